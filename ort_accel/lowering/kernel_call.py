"""Chooses the native library's kernels for nodes of a graph: the arguments that a kernel gets, and where it can run.

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
from ort_accel.kernels import (
    bit_mask,
    cross_entropy,
    gated,
    linear_4bit,
    linear_cross_entropy,
    packed_rows,
    rms_norm,
    rotary,
)
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


Calls: TypeAlias = Mapping[fx.Node, KernelCall | None]
"""Nodes that call a kernel, or else, with None, PyTorch's operator."""

_Choice = Callable[..., KernelCall | None]

_CHOICES: dict[Any, _Choice] = {}

_IN_ANY_ORDER = {rotary.own.rotary.default, rotary.own.rotary_backward.default}
"""Operators whose results have no gaps, and their dimensions in any order."""


def kernel_for(node: fx.Node) -> KernelCall | None:
    """Returns the call of a kernel that computes a node; None where there is none for its types and layouts."""
    choose = _CHOICES.get(node.target)
    if choose is None or (node.target not in _IN_ANY_ORDER and not all(map(is_plain, fakes_in(node.meta["val"])))):
        return None
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in fakes_in(node.meta["val"]))
    return choose(node, *node.args, **node.kwargs) if is_on_cpu else None


def _chosen_for(*targets: Any) -> Callable[[_Choice], _Choice]:
    """Registers a function for operators. It gets a node and the operator's arguments."""

    def register(choose: _Choice) -> _Choice:
        _CHOICES.update(dict.fromkeys(targets, choose))
        return choose

    return register


def _fake(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _element(*nodes: fx.Node | None) -> int | None:
    """Returns the kernels' number of the type that all of these tensors have; None if there is none."""
    types = {_fake(node).dtype for node in nodes if node is not None}
    return ELEMENTS.get(types.pop()) if len(types) == 1 else None


def _is_float(node: fx.Node) -> bool:
    return _fake(node).dtype == torch.float32


def _has_whole_rows(source: fx.Node) -> bool:
    return _fake(source).ndim > 0 and is_plain(_fake(source))


@_chosen_for(aten.native_layer_norm.default)
def _layer_norm(
    node: fx.Node, x: fx.Node, shape: Sequence[Size], weight: fx.Node | None, bias: fx.Node | None, eps: float
) -> KernelCall | None:
    element, of_weight = _element(x), _element(*(weight, bias) if weight or bias else (x,))
    _, mean, _ = node.meta["val"]
    if element is None or of_weight is None or mean.dtype != torch.float32:
        return None
    rows, columns = _rows_and_columns(x, shape)
    outputs = (Output(0), Output(1), Output(2))
    return KernelCall(
        "layer_norm", (x, None, weight, bias, rows, columns, float(eps), element, of_weight, None, *outputs)
    )


@_chosen_for(aten.native_layer_norm_backward.default)
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
    element, of_weight = _element(grad, x), _element(*(weight, bias) if weight or bias else (x,))
    if element is None or of_weight is None or not _is_float(mean) or not _is_float(rstd):
        return None
    rows, columns = _rows_and_columns(x, shape)
    outputs = [Output(at) if want else None for at, want in enumerate(wanted)]
    if outputs[0] is None:
        return None
    return KernelCall(
        "layer_norm_backward",
        (grad, x, weight, mean, rstd, None, rows, columns, element, of_weight, *outputs),
    )


@_chosen_for(rms_norm.own.rms_norm.default)
def _rms_norm(_: fx.Node, x: fx.Node, weight: fx.Node | None, eps: float) -> KernelCall | None:
    if not all(map(_is_float, (x, weight or x))):
        return None
    element, (rows, columns) = ELEMENTS[torch.float32], _rows_and_columns(x, _fake(x).shape[-1:])
    outputs = (Output(0), Output(1))
    return KernelCall("rms_norm", (x, None, weight, rows, columns, float(eps), element, element, None, *outputs))


@_chosen_for(rms_norm.own.rms_norm_backward.default)
def _rms_norm_backward(
    _: fx.Node, grad: fx.Node, x: fx.Node, weight: fx.Node | None, rstd: fx.Node, wanted: bool
) -> KernelCall | None:
    if not all(map(_is_float, (grad, x, weight or x))):
        return None
    element, (rows, columns) = ELEMENTS[torch.float32], _rows_and_columns(x, _fake(x).shape[-1:])
    operands, outputs = (grad, x, weight, rstd, None), (Output(0), Output(1) if wanted else None)
    return KernelCall("rms_norm_backward", (*operands, rows, columns, element, element, *outputs))


@_chosen_for(cross_entropy.own.cross_entropy_backward.default)
def _cross_entropy_backward(
    _: fx.Node,
    grad: fx.Node,
    log_probs: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignored: Size,
    total_weight: fx.Node,
) -> KernelCall | None:
    operands = (grad, log_probs, target, weight, total_weight)
    if not cross_entropy.takes(*(None if one is None else _fake(one) for one in operands)):
        return None
    total = total_weight if reduction == cross_entropy.MEAN else None
    sizes = ignored, *_fake(log_probs).shape, ELEMENTS[_fake(log_probs).dtype]
    grad_stride = int(reduction == cross_entropy.NONE)
    return KernelCall("nll_gradient", (grad, grad_stride, log_probs, target, weight, total, *sizes, Output(0)))


@_chosen_for(linear_cross_entropy.own.linear_cross_entropy.default)
def _linear_cross_entropy(
    _: fx.Node,
    hidden: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    target: fx.Node,
    reduction: int,
    ignored: Size,
    options: Sequence[float],
    wanted: Sequence[bool],
) -> KernelCall | None:
    of_bias = None if bias is None else _fake(bias)
    if not linear_cross_entropy.takes(_fake(hidden), _fake(weight), of_bias, _fake(target)):
        return None
    dtype, columns = _fake(hidden).dtype, _fake(weight).shape[0]
    sizes = *_fake(hidden).shape, columns, ELEMENTS[dtype], ignored, int(reduction == linear_cross_entropy.MEAN)
    most_rows = linear_cross_entropy.rows_at_once(columns, dtype)
    outputs = [Output(0), *(Output(1 + at) if want else None for at, want in enumerate(wanted))]
    operands = hidden, weight, bias, target
    return KernelCall("linear_cross_entropy", (*operands, *sizes, *map(float, options), most_rows, *outputs))


@_chosen_for(rotary.own.rotary.default)
def _rotary(node: fx.Node, x: fx.Node, cosines: fx.Node, sines: fx.Node) -> KernelCall | None:
    return _rotation(node, x, cosines, sines, is_backward=0)


@_chosen_for(rotary.own.rotary_backward.default)
def _rotary_backward(node: fx.Node, grad: fx.Node, cosines: fx.Node, sines: fx.Node) -> KernelCall | None:
    return _rotation(node, grad, cosines, sines, is_backward=1)


def _rotation(node: fx.Node, x: fx.Node, cosines: fx.Node, sines: fx.Node, is_backward: int) -> KernelCall | None:
    dims = rotary.outer_dims(_fake(node), _fake(cosines), _fake(sines))
    if dims is None:
        return None
    sizes, strides = [size for _, size, _ in dims], [0 if dim is None else Stride(x, dim) for dim, *_ in dims]
    in_tables = [stride for *_, stride in dims]
    operands = (x, cosines, sines, *sizes, _fake(x).shape[-1])
    return KernelCall("rotary", (*operands, *strides, *in_tables, is_backward, Output(0)))


@_chosen_for(gated.own.gated.default)
def _gated(_: fx.Node, gate: fx.Node, up: fx.Node, activation: str) -> KernelCall | None:
    if not _is_float(gate) or not _is_float(up):
        return None
    count = _fake(gate).numel()
    sizes = (1, count, count, count, ELEMENTS[torch.float32])
    return KernelCall("gated_activation", (gated.FUNCTIONS[activation], gate, up, *sizes, Output(0)))


@_chosen_for(gated.own.gated_backward.default)
def _gated_backward(_: fx.Node, grad: fx.Node, gate: fx.Node, up: fx.Node, activation: str) -> KernelCall | None:
    if not all(map(_is_float, (grad, gate, up))):
        return None
    count = _fake(gate).numel()
    operands, sizes = (grad, gate, up), (1, count, count, count, ELEMENTS[torch.float32])
    return KernelCall(
        "gated_activation_backward", (gated.FUNCTIONS[activation], *operands, *sizes, Output(0), Output(1))
    )


@_chosen_for(linear_4bit.own.linear_4bit.default)
def _linear_4bit(
    node: fx.Node,
    x: fx.Node,
    packed: fx.Node,
    shape: Sequence[int],
    absmax: fx.Node,
    blocksize: int,
    quant_type: str,
    bias: fx.Node | None,
    absmax_8bit: fx.Node | None,
    absmax_code: fx.Node | None,
    absmax_offset: fx.Node | None,
    *_: torch.dtype,
) -> KernelCall | None:
    element = _element(x, bias or x)
    if element is None or not linear_4bit.has_kernel(_fake(x), shape, blocksize):
        return None
    weight = packed, absmax, absmax_8bit, absmax_code, absmax_offset, blocksize, int(quant_type == "fp4")
    rows = prod(_fake(node).shape[:-1])
    return KernelCall("linear_4bit", (x, *weight, rows, *shape, element, linear_4bit.parts_of_float(), bias, Output(0)))


@_chosen_for(linear_4bit.own.linear_4bit_backward.default)
def _linear_4bit_backward(
    node: fx.Node,
    grad: fx.Node,
    packed: fx.Node,
    shape: Sequence[int],
    absmax: fx.Node,
    blocksize: int,
    quant_type: str,
    absmax_8bit: fx.Node | None,
    absmax_code: fx.Node | None,
    absmax_offset: fx.Node | None,
    weight_dtype: torch.dtype,
) -> KernelCall | None:
    if not linear_4bit.has_kernel(_fake(grad), shape, blocksize):
        return None
    weight = packed, absmax, absmax_8bit, absmax_code, absmax_offset, blocksize, int(quant_type == "fp4")
    elements = ELEMENTS[_fake(grad).dtype], ELEMENTS[weight_dtype]
    rows = prod(_fake(node).shape[:-1])
    return KernelCall(
        "linear_4bit_backward", (grad, *weight, rows, *shape, *elements, linear_4bit.parts_of_float(), Output(0))
    )


def _rows_and_columns(x: fx.Node, shape: Sequence[Size]) -> tuple[Size, Size]:
    sizes = _fake(x).shape
    split = len(sizes) - len(shape)
    return prod(sizes[:split]), prod(sizes[split:])


@_chosen_for(aten.add.Tensor, aten.add.Scalar)
def _add(node: fx.Node, one: fx.Node, other: fx.Node | float, alpha: float = 1) -> KernelCall | None:
    return _sum(node, one, other, alpha)


@_chosen_for(aten.sub.Tensor, aten.sub.Scalar)
def _subtract(node: fx.Node, one: fx.Node, other: fx.Node | float, alpha: float = 1) -> KernelCall | None:
    return _sum(node, one, other, -alpha)


def _sum(node: fx.Node, one: fx.Node | float, other: fx.Node | float, alpha: float) -> KernelCall | None:
    if not isinstance(one, fx.Node) or not isinstance(one.meta["val"], torch.Tensor) or isinstance(alpha, fx.Node):
        return None
    count = _fake(node).numel()
    element = _element(node, one)
    if element is None or not _same_shape(node, one):
        return None
    if isinstance(other, int | float):
        return KernelCall("add", (one, None, float(alpha * other), count, element, Output(0)))
    if not isinstance(other, fx.Node) or not isinstance(other.meta["val"], torch.Tensor):
        return None
    if _element(node, other) is None or not _same_shape(node, other):
        return None
    return KernelCall("add", (one, other, float(alpha), count, element, Output(0)))


def _same_shape(one: fx.Node, other: fx.Node) -> bool:
    sizes, others = _fake(one).shape, _fake(other).shape
    return len(sizes) == len(others) and all(map(known_equal, sizes, others)) and is_plain(_fake(other))


@_chosen_for(aten.embedding_dense_backward.default)
def _embedding_gradient(
    node: fx.Node, grad: fx.Node, index: fx.Node, rows: Size, padding: Size, scales: bool
) -> KernelCall | None:
    return None if scales else _sums_by_index(node, grad, index, rows, padding)


@_chosen_for(aten.index_add.default)
def _index_add(
    node: fx.Node, onto: fx.Node, dim: int, index: fx.Node, source: fx.Node, alpha: float = 1
) -> KernelCall | None:
    is_blank = onto.target in (aten.new_zeros.default, aten.zeros.default)
    if not is_blank or dim != 0 or alpha != 1 or _fake(onto).ndim != 2:
        return None
    return _sums_by_index(node, source, index, _fake(onto).shape[0], -1)


def _sums_by_index(node: fx.Node, grads: fx.Node, index: fx.Node, rows: Size, padding: Size) -> KernelCall | None:
    made = _fake(node)
    if made.dtype not in (torch.float32, torch.bfloat16) or _fake(grads).dtype != made.dtype:
        return None
    if _fake(index).dtype != torch.int64 or isinstance(padding, fx.Node) or isinstance(rows, fx.Node):
        return None
    columns, count = made.shape[1], _fake(index).numel()
    is_bfloat16 = int(made.dtype == torch.bfloat16)
    arguments = (grads, columns, index, count, columns, padding, Output(0), rows, is_bfloat16)
    return KernelCall("embedding_gradient", arguments)


@_chosen_for(packed_rows.own.rows_of.default)
def _rows_of(_: fx.Node, source: fx.Node, rows: fx.Node, *__: object) -> KernelCall | None:
    return _gather(source, rows)


@_chosen_for(aten.embedding.default)
def _embedding(_: fx.Node, weight: fx.Node, index: fx.Node, *__: object) -> KernelCall | None:
    return _gather(weight, index)


@_chosen_for(aten.index_select.default)
def _index_select(_: fx.Node, source: fx.Node, dim: int, index: fx.Node) -> KernelCall | None:
    return _gather(source, index) if dim == 0 else None


def _gather(source: fx.Node, index: fx.Node) -> KernelCall | None:
    if _fake(index).dtype != torch.int64 or not _has_whole_rows(source):
        return None
    rows, *others = _fake(source).shape
    row_bytes = prod(others) * _fake(source).element_size()
    count = _fake(index).numel()
    return KernelCall("gather_rows", (source, rows, row_bytes, index, count, row_bytes, Output(0), row_bytes))


@_chosen_for(bit_mask.own.apply_bits.default)
def _apply_bits(_: fx.Node, source: fx.Node, mask: fx.Node, scale: float) -> KernelCall | None:
    element = _element(source)
    if element is None or not is_plain(_fake(source)):
        return None
    return KernelCall("apply_dropout", (source, mask, _fake(source).numel(), float(scale), element, Output(0)))
