"""What can be told from a node of an ATen graph."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.traceback import GRADIENT_ACC_SPECIAL_STACK, get_current_meta

import ort_accel
from ort_accel.graph.symbolic_sizes import hinted_bytes

aten = torch.ops.aten

CHECKS = {
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
"""What says something of numbers in tensors."""

FROM_DATA = "from data"
"""Key in a node's meta: its value is such a number."""

_TORCH, _OWN = (f"{PurePath(file).parent}/" for file in (torch.__file__, ort_accel.__file__))
"""Folders of code that is not the model's. Lines of PyTorch's modules count where there are no others."""

_FRAME = re.compile(r'File "(.+)", line (\d+), in .+\n +(.+)')


def op_name(node: fx.Node) -> str:
    """The operator as a user knows it: `aten.gelu.default`."""
    return str(node.target)


def user_line(node: fx.Node) -> str:
    """The line of the model's code that a node comes from, as `modeling_bert.py:233: hidden = self.dense(hidden)`."""
    trace = node.meta.get("stack_trace") or ""
    if GRADIENT_ACC_SPECIAL_STACK in trace:  # a sum of gradients; the trace names the line of one that is added
        return ""
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_OWN)]
    if not frames:
        return ""
    path, line, code = next((frame for frame in reversed(frames) if not frame[0].startswith(_TORCH)), frames[-1])
    return f"{PurePath(path).name}:{line}: {code}"


@contextmanager
def of_no_line() -> Iterator[None]:
    """Give the nodes that a trace makes in here no line of the model, since a rewrite alone asks for them."""
    meta = get_current_meta()
    trace = meta.pop("stack_trace", None)
    try:
        yield
    finally:
        if trace is not None:
            meta["stack_trace"] = trace


def call(node: fx.Node) -> str:
    """A node as a call with the types and sizes of its tensors: `aten.mm.default(float32 [8, 4], float32 [4, 2])`."""
    tensors = [fake for item in node.all_input_nodes for fake in fakes_in(item.meta.get("val"))]
    shown = ", ".join(f"{str(fake.dtype).removeprefix('torch.')} {list(fake.shape)}" for fake in tensors)
    return f"{op_name(node)}({shown})"


def find_numbers_from_data(graph: fx.Graph) -> None:
    """Mark the numbers that are known only once something has run: what `.item()` gives, how many elements are not
    zero, and what is computed from those.

    A trace takes a number that has to be 1, say, for 1, so that the value noted with a node does not tell.
    """
    for node in graph.nodes:
        if node.target in CHECKS:
            node.meta.setdefault("val", None)  # a trace notes nothing
        if _is_number(node) and (_reads_data(node) or any(map(is_from_data, node.all_input_nodes))):
            node.meta[FROM_DATA] = True


def is_from_data(node: fx.Node) -> bool:
    """Whether a node's value is a number that follows from what a tensor holds."""
    return FROM_DATA in node.meta or (_is_number(node) and _has_data_size(node))


def depends_on_data(node: fx.Node) -> bool:
    """Whether a node gives, takes or checks numbers that follow from what a tensor holds, or tensors of such sizes.
    These may be empty, and of empty tensors some kernels of ONNX Runtime give nothing, or no NaN for a mean."""
    return node.target in CHECKS or _reads_data(node) or any(map(_is_of_data, (node, *node.all_input_nodes)))


def _is_of_data(node: fx.Node) -> bool:
    return is_from_data(node) or _has_data_size(node)


def _has_data_size(node: fx.Node) -> bool:
    return bool(free_unbacked_symbols(node.meta.get("val")))


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _reads_data(node: fx.Node) -> bool:
    return torch.Tag.data_dependent_output in getattr(node.target, "tags", ())


def is_size(node: fx.Node) -> bool:
    """Whether a node's value is an integer size, which is computed from the inputs' sizes rather than run."""
    return isinstance(node.meta.get("val"), int | torch.SymInt) and not is_from_data(node)


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at its input's memory in another way."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is torch.ops.aten._unsafe_view.default:  # a view of a tensor that nothing else reads
        return True
    aliases = [item.alias_info for item in target._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def order_of(node: fx.Node) -> list[int]:
    """Where each dimension of a `t`, a `transpose` or a `permute` comes from."""
    order = list(range(node.meta["val"].ndim))
    given: Any = node.args[1:]
    if node.target is torch.ops.aten.permute.default:
        return [order[dim] for dim in given[0]]
    if node.target is torch.ops.aten.t.default or not order:
        return order[::-1]
    first, second = given
    order[first], order[second] = order[second], order[first]
    return order


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_watched(node: fx.Node) -> bool:
    """Whether a node shows a tensor to a subscriber."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.startswith("ort_accel::watch")


def writes(node: fx.Node) -> bool:
    """Whether a node may change a tensor that it was given."""
    target = node.target
    if is_from_data(node):
        return False
    return not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable


def is_part(node: fx.Node) -> bool:
    """Whether a node only takes one of the several outputs of another."""
    return node.target is operator.getitem


def constant_of(node: fx.Node) -> torch.Tensor:
    """The tensor that a `get_attr` node stands for, such as the number in `torch.tensor(0.5)`."""
    assert isinstance(node.target, str)
    tensor: torch.Tensor = operator.attrgetter(node.target)(node.graph.owning_module)
    return tensor


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node makes: itself, or those of its several outputs that are taken."""
    return [user for user in node.users if is_part(user)] or [node]


def fakes_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value, or in a list of values."""
    items = value if isinstance(value, tuple | list) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def bytes_made(node: fx.Node) -> int:
    """The bytes of all tensors in a node's value, at the sizes that the graph was captured with."""
    return sum(map(hinted_bytes, fakes_in(node.meta.get("val"))))


def half_of(node: fx.Node) -> dict[str, str]:
    """The part of a node's meta that tells to which half of a joint graph it belongs."""
    return {"partitioner_tag": node.meta["partitioner_tag"]} if "partitioner_tag" in node.meta else {}


def size_arguments(graph: fx.Graph, node: fx.Node, shape: Sequence[Any]) -> list[Any]:
    """The sizes of a node's value as arguments of a call: numbers, or nodes where they may change."""
    sizes: list[Any] = []
    for dim, size in enumerate(shape):
        if isinstance(size, torch.SymInt):
            asked = graph.call_function(aten.sym_size.int, (node, dim))
            asked.meta = {"val": size} | half_of(node)
            sizes.append(asked)
        else:
            sizes.append(size)
    return sizes


def is_returned(node: fx.Node) -> bool:
    """Whether a graph returns what this node makes."""
    return any(user.op == "output" for user in node.users)


def returned(graph: fx.Graph) -> Sequence[Any]:
    """What a graph returns: nodes, plain numbers, or None."""
    outputs: Any = graph.output_node().args[0]
    return outputs if isinstance(outputs, tuple | list) else (outputs,)


def count_ops(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """How many nodes of each operator, most frequent first."""
    return dict(Counter(map(op_name, nodes)).most_common())
