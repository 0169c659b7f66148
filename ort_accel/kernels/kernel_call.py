"""Chooses the native library's kernels for nodes of a graph: the arguments that a kernel gets, and where it can run.

This file has the choices for ATen operators. The file of an operator of ort_accel has its own.
A model calls them by the custom operator `KernelCall`. A kernel reads contiguous tensors, except for those whose
strides it gets, and writes tensors without gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import fx

from ort_accel.graph.memory_layout import is_plain
from ort_accel.graph.nodes import fakes_in
from ort_accel.graph.symbolic_sizes import Size, known_equal
from ort_accel.native.run_kernel import ELEMENTS

aten = torch.ops.aten


@dataclass(frozen=True)
class Output:
    """The argument by which a kernel gets the memory of one of the operator's results."""

    position: int


@dataclass(frozen=True)
class Stride:
    """The distance of a tensor's entries along a dimension.

    The kernel reads the tensor where it lies. Entries of the last dimension lie side by side.
    """

    node: fx.Node
    dim: int


KernelArgument: TypeAlias = fx.Node | Output | Stride | Size | float | None


@dataclass(frozen=True)
class KernelCall:
    """A kernel, and its arguments. A tensor is a node, and None is an address of nothing."""

    name: str
    arguments: Sequence[KernelArgument]
    reads_any_layout: bool = False
    """The kernel reads tensors with the strides that they have in the graph, instead of contiguous ones."""


Calls: TypeAlias = Mapping[fx.Node, KernelCall | None]
"""Nodes that call a kernel, or else, with None, PyTorch's operator."""

_Choice = Callable[..., KernelCall | None]

_CHOICES: dict[Any, _Choice] = {}

_IN_ANY_ORDER: set[Any] = set()
"""Operators whose results have no gaps, and their dimensions in any order."""


def kernel_for(node: fx.Node) -> KernelCall | None:
    """Returns the call of a kernel that computes a node; None where there is none for its types and layouts."""
    choose = _CHOICES.get(node.target)
    if choose is None or (node.target not in _IN_ANY_ORDER and not all(map(is_plain, fakes_in(node.meta["val"])))):
        return None
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in fakes_in(node.meta["val"]))
    return choose(node, *node.args, **node.kwargs) if is_on_cpu else None


def chosen_for(*targets: Any, in_any_order: bool = False) -> Callable[[_Choice], _Choice]:
    """Registers a function for operators, which gets a node and the operator's arguments, and returns a kernel's call.

    With `in_any_order`, the dimensions of results may lie in any order, without gaps; otherwise they are contiguous.
    """

    def register(choose: _Choice) -> _Choice:
        _CHOICES.update(dict.fromkeys(targets, choose))
        if in_any_order:
            _IN_ANY_ORDER.update(targets)
        return choose

    return register


def fake_of(node: fx.Node) -> torch.Tensor:
    """Returns the fake tensor of a node with one result."""
    value: torch.Tensor = node.meta["val"]
    return value


def element_of(*nodes: fx.Node | None) -> int | None:
    """Returns the kernels' number of the type that all of these tensors have; None if there is none."""
    types = {fake_of(node).dtype for node in nodes if node is not None}
    return ELEMENTS.get(types.pop()) if len(types) == 1 else None


def is_float(node: fx.Node) -> bool:
    """True for a tensor in single precision."""
    return fake_of(node).dtype == torch.float32


def _has_whole_rows(source: fx.Node) -> bool:
    return fake_of(source).ndim > 0 and is_plain(fake_of(source))


@chosen_for(aten.native_layer_norm.default)
def _layer_norm(
    node: fx.Node, x: fx.Node, shape: Sequence[Size], weight: fx.Node | None, bias: fx.Node | None, eps: float
) -> KernelCall | None:
    element, of_weight = element_of(x), element_of(*(weight, bias) if weight or bias else (x,))
    _, mean, _ = node.meta["val"]
    if element is None or of_weight is None or mean.dtype != torch.float32:
        return None
    rows, columns = rows_and_columns(x, shape)
    outputs = (Output(0), Output(1), Output(2))
    return KernelCall(
        "layer_norm", (x, None, weight, bias, rows, columns, float(eps), element, of_weight, None, *outputs)
    )


@chosen_for(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    _: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    shape: Sequence[Size],
    mean: fx.Node,
    rstd: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    wanted: Sequence[bool],
) -> KernelCall | None:
    element, of_weight = element_of(grad, x), element_of(*(weight, bias) if weight or bias else (x,))
    if element is None or of_weight is None or not is_float(mean) or not is_float(rstd):
        return None
    rows, columns = rows_and_columns(x, shape)
    outputs = [Output(at) if want else None for at, want in enumerate(wanted)]
    if outputs[0] is None:
        return None
    return KernelCall(
        "layer_norm_backward",
        (grad, x, weight, mean, rstd, None, rows, columns, element, of_weight, *outputs),
    )


def rows_and_columns(x: fx.Node, shape: Sequence[Size]) -> tuple[Size, Size]:
    """Returns the sizes of a tensor as a matrix, whose rows have this shape."""
    sizes = fake_of(x).shape
    split = len(sizes) - len(shape)
    return prod(sizes[:split]), prod(sizes[split:])


@chosen_for(aten.add.Tensor, aten.add.Scalar)
def _add(node: fx.Node, one: fx.Node, other: fx.Node | float, alpha: float = 1) -> KernelCall | None:
    return _sum(node, one, other, alpha)


@chosen_for(aten.sub.Tensor, aten.sub.Scalar)
def _subtract(node: fx.Node, one: fx.Node, other: fx.Node | float, alpha: float = 1) -> KernelCall | None:
    return _sum(node, one, other, -alpha)


def _sum(node: fx.Node, one: fx.Node | float, other: fx.Node | float, alpha: float) -> KernelCall | None:
    if not isinstance(one, fx.Node) or not isinstance(one.meta["val"], torch.Tensor) or isinstance(alpha, fx.Node):
        return None
    count = fake_of(node).numel()
    element = element_of(node, one)
    if element is None or not _same_shape(node, one):
        return None
    if isinstance(other, int | float):
        return KernelCall("add", (one, None, float(alpha * other), count, element, Output(0)))
    if not isinstance(other, fx.Node) or not isinstance(other.meta["val"], torch.Tensor):
        return None
    if element_of(node, other) is None or not _same_shape(node, other):
        return None
    return KernelCall("add", (one, other, float(alpha), count, element, Output(0)))


def _same_shape(one: fx.Node, other: fx.Node) -> bool:
    sizes, others = fake_of(one).shape, fake_of(other).shape
    return len(sizes) == len(others) and all(map(known_equal, sizes, others)) and is_plain(fake_of(other))


@chosen_for(aten.embedding_dense_backward.default)
def _embedding_gradient(
    node: fx.Node, grad: fx.Node, index: fx.Node, rows: Size, padding: Size, scales: bool
) -> KernelCall | None:
    return None if scales else _sums_by_index(node, grad, index, rows, padding)


@chosen_for(aten.index_add.default)
def _index_add(
    node: fx.Node, onto: fx.Node, dim: int, index: fx.Node, source: fx.Node, alpha: float = 1
) -> KernelCall | None:
    is_blank = onto.target in (aten.new_zeros.default, aten.zeros.default)
    if not is_blank or dim != 0 or alpha != 1 or fake_of(onto).ndim != 2:
        return None
    return _sums_by_index(node, source, index, fake_of(onto).shape[0], -1)


def _sums_by_index(node: fx.Node, grads: fx.Node, index: fx.Node, rows: Size, padding: Size) -> KernelCall | None:
    made = fake_of(node)
    if made.dtype not in (torch.float32, torch.bfloat16) or fake_of(grads).dtype != made.dtype:
        return None
    if fake_of(index).dtype != torch.int64 or isinstance(padding, fx.Node) or isinstance(rows, fx.Node):
        return None
    columns, count = made.shape[1], fake_of(index).numel()
    is_bfloat16 = int(made.dtype == torch.bfloat16)
    arguments = (grads, columns, index, count, columns, padding, Output(0), rows, is_bfloat16)
    return KernelCall("embedding_gradient", arguments)


@chosen_for(aten.embedding.default)
def _embedding(_: fx.Node, weight: fx.Node, index: fx.Node, *__: object) -> KernelCall | None:
    return gather(weight, index)


@chosen_for(aten.index_select.default)
def _index_select(_: fx.Node, source: fx.Node, dim: int, index: fx.Node) -> KernelCall | None:
    return gather(source, index) if dim == 0 else None


def gather(source: fx.Node, index: fx.Node) -> KernelCall | None:
    """Returns the call that takes rows of a tensor."""
    if fake_of(index).dtype != torch.int64 or not _has_whole_rows(source):
        return None
    rows, *others = fake_of(source).shape
    row_bytes = prod(others) * fake_of(source).element_size()
    count = fake_of(index).numel()
    return KernelCall("gather_rows", (source, rows, row_bytes, index, count, row_bytes, Output(0), row_bytes))
