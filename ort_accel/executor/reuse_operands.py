"""Which operands of PyTorch's operators nobody needs afterwards, so that the result can be written over them.

Eager mode adds gradients up that way; a graph names each sum anew. Memory that was just read is in the cache of the
processor, new memory is not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from ort_accel.graph.memory_layout import is_plain
from ort_accel.graph.nodes import is_random, is_view
from ort_accel.graph.symbolic_sizes import same_shape
from ort_accel.kernels.output_buffers import with_place
from ort_accel.operators.facts import facts
from ort_accel.passes.fuse_tied_embedding import add_embedding_gradient
from ort_accel.reporting import Runner


def is_own(node: fx.Node, runner: Runner) -> bool:
    """Whether what a node gives is in memory that a program may write over once nobody reads it any more."""
    return (runner is Runner.PYTORCH and makes_memory(node)) or facts(node).is_never_constant


def dying_operands(
    nodes: Sequence[fx.Node], wanted: Sequence[fx.Node], spent: Collection[fx.Node] = ()
) -> dict[fx.Node, fx.Node]:
    """For nodes of a segment, in order, that compute element by element: the operand that the result may replace.

    Its memory was made by this segment, or is one of the `spent` inputs, whose memory nobody else uses any more; and
    this node is the last to read it, or any view of it.
    """
    order = dict.fromkeys(spent, -1) | {node: position for position, node in enumerate(nodes)}
    kept = set(wanted)
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        dying = (operand for operand in replaceable(node) if _dies(operand, node, order, kept))
        if (operand := next(dying, None)) is not None:
            found[node] = operand
    return found


def write_over(call: fx.Node, operand: fx.Node) -> None:
    """Let a call of such an operator write its result over this operand."""
    if facts(call).adds_onto_first:
        call.target = add_embedding_gradient
        return
    found = with_place(call.target)
    assert found is not None
    call.target, place = found
    call.kwargs = {**call.kwargs, place: operand}


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on those at its place alone. Not so draws: PyTorch draws into the
    place of the result before it reads the operands."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise and not is_random(node) and with_place(node.target) is not None


def replaceable(node: fx.Node) -> list[fx.Node]:
    """The operands that a result may be written over, with its size, type and order in memory."""
    operands = node.args[:1] if facts(node).adds_onto_first else node.args if _is_elementwise(node) else ()
    nodes = [item for item in operands if isinstance(item, fx.Node)]
    return [item for item in nodes if _are_alike(item.meta.get("val"), node.meta["val"])]


def _are_alike(value: Any, result: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or (value.dtype, value.device) != (result.dtype, result.device):
        return False
    return same_shape(value.shape, result.shape) and is_plain(value) and is_plain(result)


def _dies(operand: fx.Node, reader: fx.Node, order: dict[fx.Node, int], wanted: set[fx.Node]) -> bool:
    """Whether nothing but this reader needs the memory of an operand any more."""
    chain = [operand]
    while chain[-1] in order and is_view(chain[-1]):
        chain.append(chain[-1].all_input_nodes[0])
    return chain[-1] in order and makes_memory(chain[-1]) and _is_last(chain, reader, order, wanted)


def makes_memory(node: fx.Node) -> bool:
    """Whether an operator of PyTorch gives a tensor in memory of its own, or in what is left of an operand."""
    return facts(node).adds_onto_first or with_place(node.target) is not None


def _is_last(chain: Sequence[fx.Node], reader: fx.Node, order: dict[fx.Node, int], wanted: set[fx.Node]) -> bool:
    """Whether this reader is the last of a chain of views, and reads its first alone: others may have another order."""
    _, *behind = chain
    if any(node in wanted for node in chain) or any(reader in node.users for node in behind):
        return False
    others = {user for node in chain for user in node.users if user in order} - {*chain, reader}
    return not any(is_view(user) or order[user] > order[reader] for user in others)
