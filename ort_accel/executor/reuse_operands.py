"""Writes results of PyTorch's operators over operands that nobody needs afterwards.

Eager mode adds gradients up that way. Memory that was just read is in the processor's cache; new memory is not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from ort_accel.graph.memory_layout import is_plain
from ort_accel.graph.nodes import is_random, is_view
from ort_accel.graph.symbolic_sizes import same_shape
from ort_accel.kernels.output_buffers import out_overload
from ort_accel.operators.facts import facts
from ort_accel.passes.fuse_tied_embedding import add_embedding_gradient
from ort_accel.reporting.segments import Runner


def is_reusable(node: fx.Node, runner: Runner) -> bool:
    """True if a program may write over a node's result once nobody reads it any more."""
    return (runner is Runner.PYTORCH and makes_memory(node)) or facts(node).is_never_constant


def reusable_operands(
    nodes: Sequence[fx.Node], wanted: Sequence[fx.Node], dead_inputs: Collection[fx.Node] = ()
) -> dict[fx.Node, fx.Node]:
    """Returns the operand that the result may be written over, for elementwise nodes of a segment.

    1. The segment made the operand's memory, or the operand is one of `dead_inputs`.
    2. The node is the last to read the operand or any view of it.
    """
    order = dict.fromkeys(dead_inputs, -1) | {node: position for position, node in enumerate(nodes)}
    kept = set(wanted)
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        reusable = (operand for operand in replaceable(node) if _dies(operand, node, order, kept))
        if (operand := next(reusable, None)) is not None:
            found[node] = operand
    return found


def write_over(call: fx.Node, operand: fx.Node) -> None:
    """Makes a call write its result over this operand."""
    if facts(call).adds_onto_first:
        call.target = add_embedding_gradient
        return
    found = out_overload(call.target)
    assert found is not None
    call.target, out_argument = found
    call.kwargs = {**call.kwargs, out_argument: operand}


def _is_elementwise(node: fx.Node) -> bool:
    """True if each element of the result depends on the operands' elements at the same index alone.

    Random draws are excluded: PyTorch draws into the result's memory before it reads the operands.
    """
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise and not is_random(node) and out_overload(node.target) is not None


def replaceable(node: fx.Node) -> list[fx.Node]:
    """Returns the operands with the size, dtype and layout of a result, which may be written over them."""
    operands = node.args[:1] if facts(node).adds_onto_first else node.args if _is_elementwise(node) else ()
    nodes = [item for item in operands if isinstance(item, fx.Node)]
    return [item for item in nodes if _are_alike(item.meta.get("val"), node.meta["val"])]


def _are_alike(value: object, result: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or (value.dtype, value.device) != (result.dtype, result.device):
        return False
    return same_shape(value.shape, result.shape) and is_plain(value) and is_plain(result)


def _dies(operand: fx.Node, reader: fx.Node, order: dict[fx.Node, int], wanted: set[fx.Node]) -> bool:
    """True if nothing but this reader needs the memory of an operand any more."""
    chain = [operand]
    while chain[-1] in order and is_view(chain[-1]):
        chain.append(chain[-1].all_input_nodes[0])
    return chain[-1] in order and makes_memory(chain[-1]) and _is_last(chain, reader, order, wanted)


def makes_memory(node: fx.Node) -> bool:
    """True if PyTorch gives the result of a node in new memory, or in that of an operand."""
    return facts(node).adds_onto_first or out_overload(node.target) is not None


def _is_last(chain: Sequence[fx.Node], reader: fx.Node, order: dict[fx.Node, int], wanted: set[fx.Node]) -> bool:
    """True if this reader is the last of a chain of views and reads only its first, since others may be permuted."""
    _, *behind = chain
    if any(node in wanted for node in chain) or any(reader in node.users for node in behind):
        return False
    others = {user for node in chain for user in node.users if user in order} - {*chain, reader}
    return not any(is_view(user) or order[user] > order[reader] for user in others)
