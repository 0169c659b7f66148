"""Gathered and summed rows, and copies between layouts, against PyTorch's. All are equal bit by bit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from ort_accel.native.library import kernel
from ort_accel.native.run_kernel import run_kernel
from tests.native.levels import each_level, each_type

POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
SHAPES = [(0, 5, 3), (1, 1, 1), (7, 3, 17), (40, 9, 100), (300, 50, 700), (33, 1, 4096)]
each_shape = pytest.mark.parametrize(("count", "rows", "columns"), SHAPES)


def operands(count: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns rows with room between them, and an index into others."""
    torch.manual_seed(count + columns)
    return torch.randn(count, columns + 3).to(dtype)[:, :columns], torch.randint(rows, (count,))


@each_level
@each_type
@each_shape
def test_gather(count: int, rows: int, columns: int, dtype: torch.dtype, level: int) -> None:
    source = torch.randn(rows, columns + 1).to(dtype)[:, :columns]
    target, index = operands(count, rows, columns, dtype)
    gather = kernel("gather_rows", POINTER, SIZE, SIZE, POINTER, SIZE, SIZE, POINTER, SIZE, level=level)
    size = dtype.itemsize
    strides = source.stride(0) * size, target.stride(0) * size
    gather(
        source.data_ptr(), rows, strides[0], index.data_ptr(), count, columns * size, target.data_ptr(), strides[1]
    )  # fmt: skip
    assert torch.equal(target, source[index])


@each_level
def test_an_index_beyond_the_rows_is_left_out(level: int) -> None:
    index = torch.tensor([1, 5, -1])
    gather = kernel("gather_rows", POINTER, SIZE, SIZE, POINTER, SIZE, SIZE, POINTER, SIZE, level=level)
    source, target = torch.arange(15.0).view(5, 3), torch.zeros(3, 3)
    gather(source.data_ptr(), 5, 12, index.data_ptr(), 3, 12, target.data_ptr(), 12)
    assert target.tolist() == [[3, 4, 5], [0, 0, 0], [0, 0, 0]]
    _scatter(source[:3], index, target, level)
    assert target.tolist() == [[3, 4, 5], [0, 1, 2], [0, 0, 0]]


def _scatter(source: Tensor, index: Tensor, target: Tensor, level: int) -> None:
    scatter = kernel("scatter_add_rows", POINTER, SIZE, POINTER, SIZE, SIZE, POINTER, SIZE, SIZE, SIZE, level=level)
    scatter(
        source.data_ptr(), source.stride(0), index.data_ptr(), *source.shape, target.data_ptr(), target.shape[0],
        target.stride(0), source.dtype == torch.bfloat16,
    )  # fmt: skip


@each_level
@each_type
@each_shape
def test_scatter_add(count: int, rows: int, columns: int, dtype: torch.dtype, level: int) -> None:
    source, index = operands(count, rows, columns, dtype)
    target = torch.randn(rows, columns + 2).to(dtype)[:, :columns]
    expected = target.clone()
    for row, at in zip(source, index.tolist(), strict=True):
        expected[at] += row
    _scatter(source, index, target, level)
    assert torch.equal(target, expected)


@each_level
@each_type
@each_shape
@pytest.mark.parametrize("padding_index", [-1, 0])
def test_embedding_gradient(
    count: int, rows: int, columns: int, padding_index: int, dtype: torch.dtype, level: int
) -> None:
    grads, index = operands(count, rows, columns, dtype)
    weight_grad = torch.full((rows, columns), 7.0, dtype=dtype)
    types = POINTER, SIZE, POINTER, SIZE, SIZE, SIZE, POINTER, SIZE, SIZE
    kernel("embedding_gradient", *types, level=level)(
        grads.data_ptr(), grads.stride(0), index.data_ptr(), count, columns, padding_index, weight_grad.data_ptr(),
        rows, dtype == torch.bfloat16,
    )  # fmt: skip
    expected = torch.ops.aten.embedding_dense_backward(grads, index, rows, padding_index, False)
    assert torch.equal(weight_grad, expected)


@each_level
@each_shape
@pytest.mark.parametrize("scale", [None, 0.3])
def test_sum_with_an_embedding_gradient(count: int, rows: int, columns: int, scale: float | None, level: int) -> None:
    grads, index = operands(count, rows, columns, torch.float32)
    grads = grads.contiguous()
    base, out = torch.randn(rows, columns), torch.full((rows, columns), 7.0)
    factor = None if scale is None else torch.tensor(scale)
    run_kernel("add_embedding_gradient", base, factor, grads, index, count, columns, 0, out, rows, level=level)
    added = torch.ops.aten.embedding_dense_backward(grads, index, rows, 0, False)
    tolerance = 0 if scale is None else 1e-6
    torch.testing.assert_close(out, base * (scale or 1) + added, rtol=tolerance, atol=tolerance)


@each_level
@each_type
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 1, 1), (0, 2, 3, 4), (4, 120, 6, 64)])
def test_layouts(shape: tuple[int, ...], dtype: torch.dtype, level: int) -> None:
    source = torch.randn(shape).to(dtype).transpose(1, 2)
    target = torch.zeros(source.shape, dtype=dtype)
    size = dtype.itemsize
    strides = [(SIZE * 3)(*(stride * size for stride in one.stride()[:3])) for one in (source, target)]
    copy = kernel("copy_layout", POINTER, POINTER, POINTER, POINTER, POINTER, SIZE, level=level)
    copy(source.data_ptr(), strides[0], target.data_ptr(), strides[1], (SIZE * 3)(*source.shape[:3]), shape[3] * size)
    assert torch.equal(target, source)
