"""Predicates and values of one node of an ATen graph."""

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
from ort_accel.graph.meta_keys import FROM_DATA, PARTITIONER_TAG
from ort_accel.graph.symbolic_sizes import Size, hinted_bytes

aten = torch.ops.aten

CHECKS = {
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
"""Operators that assert something about numbers in tensors."""

_TORCH_FOLDER, _ENGINE_FOLDER = (f"{PurePath(file).parent}/" for file in (torch.__file__, ort_accel.__file__))

_FRAME = re.compile(r'File "(.+)", line (\d+), in .+\n +(.+)')


def op_name(node: fx.Node) -> str:
    """Returns the operator's name: `aten.gelu.default`."""
    return str(node.target)


def is_operator(name: str) -> bool:
    """True if PyTorch has an operator of this name: `aten.gelu`, `aten.gelu.default`."""
    found: object = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def user_line(node: fx.Node) -> str:
    """Returns the model's line that made a node (`modeling_bert.py:233: x = self.dense(x)`), else PyTorch's."""
    trace = node.meta.get("stack_trace") or ""
    if GRADIENT_ACC_SPECIAL_STACK in trace:  # a sum of gradients, whose trace is that of one summand
        return ""
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_ENGINE_FOLDER)]
    if not frames:
        return ""
    path, line, code = next((frame for frame in reversed(frames) if not frame[0].startswith(_TORCH_FOLDER)), frames[-1])
    return f"{PurePath(path).name}:{line}: {code}"


@contextmanager
def without_source_line() -> Iterator[None]:
    """Traces nodes without a source line, since a rewrite adds them and no line of the model does."""
    meta = get_current_meta()
    trace = meta.pop("stack_trace", None)
    try:
        yield
    finally:
        if trace is not None:
            meta["stack_trace"] = trace


def call(node: fx.Node) -> str:
    """Returns a node with its tensors' types and sizes: `aten.mm.default(float32 [8, 4], float32 [4, 2])`."""
    tensors = [fake for item in node.all_input_nodes for fake in fakes_in(item.meta.get("val"))]
    shown = ", ".join(f"{str(fake.dtype).removeprefix('torch.')} {list(fake.shape)}" for fake in tensors)
    return f"{op_name(node)}({shown})"


def mark_data_dependent_scalars(graph: fx.Graph) -> None:
    """Marks data-dependent scalars: results of `.item()`, counts of non-zero elements, and values computed from them.

    The traced value does not tell: a trace replaces a scalar that must be 1 by the constant 1.
    """
    for node in graph.nodes:
        if node.target in CHECKS:
            node.meta.setdefault("val", None)  # a trace sets none
        if _is_number(node) and (_reads_data(node) or any(map(is_data_dependent_scalar, node.all_input_nodes))):
            node.meta[FROM_DATA] = True


def is_data_dependent_scalar(node: fx.Node) -> bool:
    """True if a node's value is a data-dependent scalar."""
    return FROM_DATA in node.meta or (_is_number(node) and _has_data_size(node))


def is_data_dependent(node: fx.Node) -> bool:
    """True if a node returns, takes or asserts data-dependent scalars, or tensors of data-dependent sizes.

    Such tensors may be empty, and some kernels of ONNX Runtime return wrong results for empty tensors.
    """
    around = (node, *node.all_input_nodes)
    has_data = any(is_data_dependent_scalar(item) or _has_data_size(item) for item in around)
    return has_data or node.target in CHECKS or _reads_data(node)


def _has_data_size(node: fx.Node) -> bool:
    return bool(free_unbacked_symbols(node.meta.get("val")))


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _reads_data(node: fx.Node) -> bool:
    return torch.Tag.data_dependent_output in getattr(node.target, "tags", ())


def is_size(node: fx.Node) -> bool:
    """True if a node's value is an integer that follows from the inputs' sizes."""
    return isinstance(node.meta.get("val"), int | torch.SymInt) and not is_data_dependent_scalar(node)


def is_view(node: fx.Node) -> bool:
    """True if a node returns a view of its input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is torch.ops.aten._unsafe_view.default:  # its schema declares no alias
        return True
    aliases = [item.alias_info for item in target._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def permutation_of(node: fx.Node) -> list[int]:
    """Returns the permutation of a `t`, a `transpose` or a `permute`: the source of each dimension."""
    order = list(range(node.meta["val"].ndim))
    dims: Any = node.args[1:]
    if node.target is torch.ops.aten.permute.default:
        return [order[dim] for dim in dims[0]]
    if node.target is torch.ops.aten.t.default or not order:
        return order[::-1]
    first, second = dims
    order[first], order[second] = order[second], order[first]
    return order


def is_random(node: fx.Node) -> bool:
    """True if a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_watch_call(node: fx.Node) -> bool:
    """True if a node passes a tensor to a subscriber."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.startswith("ort_accel::watch")


def writes(node: fx.Node) -> bool:
    """True if a node may mutate an input."""
    target = node.target
    if is_data_dependent_scalar(node):
        return False
    return not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable


def is_getitem(node: fx.Node) -> bool:
    """True if a node takes one of the several outputs of another node."""
    return node.target is operator.getitem


def constant_of(node: fx.Node) -> torch.Tensor:
    """Returns the tensor of a `get_attr` node, such as the number in `torch.tensor(0.5)`."""
    assert isinstance(node.target, str)
    tensor: torch.Tensor = operator.attrgetter(node.target)(node.graph.owning_module)
    return tensor


def output_nodes_of(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes of a node's output tensors: itself, or those that take one of its several outputs."""
    return [user for user in node.users if is_getitem(user)] or [node]


def fakes_in(value: object) -> list[torch.Tensor]:
    """Returns the tensors in a node's value, or in a list of values."""
    items = value if isinstance(value, tuple | list) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def output_bytes(node: fx.Node) -> int:
    """Returns the bytes of a node's output tensors, at the sizes of the capture."""
    return sum(map(hinted_bytes, fakes_in(node.meta.get("val"))))


def partition_tag_of(node: fx.Node) -> dict[str, str]:
    """Returns the entry of a node's meta that assigns it to the forward or the backward of a joint graph."""
    return {PARTITIONER_TAG: node.meta[PARTITIONER_TAG]} if PARTITIONER_TAG in node.meta else {}


def size_arguments(graph: fx.Graph, node: fx.Node, shape: Sequence[Size]) -> list[int | fx.Node]:
    """Returns the sizes of a node's value as arguments of a call: fixed ones as numbers, symbolic ones as nodes."""
    sizes: list[int | fx.Node] = []
    for dim, size in enumerate(shape):
        if isinstance(size, torch.SymInt):
            size_node = graph.call_function(aten.sym_size.int, (node, dim))
            size_node.meta = {"val": size} | partition_tag_of(node)
            sizes.append(size_node)
        else:
            sizes.append(size)
    return sizes


def is_returned(node: fx.Node) -> bool:
    """True if a graph returns this node."""
    return any(user.op == "output" for user in node.users)


def returned(graph: fx.Graph) -> Sequence[Any]:
    """Returns a graph's outputs: nodes, plain numbers, or None."""
    outputs: Any = graph.output_node().args[0]
    return outputs if isinstance(outputs, tuple | list) else (outputs,)


def count_ops(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """Returns the number of nodes of each operator, most frequent first."""
    return dict(Counter(map(op_name, nodes)).most_common())
