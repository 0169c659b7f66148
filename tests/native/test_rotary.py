"""The rotary embedding of Hugging Face's models has eager's bits, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ort_accel.native.run_kernel import run_kernel
from tests.native.levels import each_level, same_bits

SHAPES = [(2, 9, 3, 64), (1, 1, 1, 2), (2, 5, 2, 6), (1, 7, 4, 34), (3, 1, 2, 128), (2, 700, 3, 80), (0, 3, 2, 8)]
TABLES = [(2, 0, 1), (2, 0), (0,), ()]
"""The dimensions, of four, along which a table has entries of its own; the last one is in each table."""


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def expected(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return (x * cosines) + (rotate_half(x) * sines)


def ours(x: Tensor, tables: Sequence[Tensor], level: int, is_backward: int = 0) -> Tensor:
    """Runs the kernel; its result lies in memory as the dimensions of x come."""
    out = torch.empty(x.shape)
    in_tables = [0 if size == 1 else stride for size, stride in zip(tables[0].shape, tables[0].stride(), strict=True)]
    sizes, strides = (*x.shape[:3], x.shape[3]), (*x.stride()[:3], *in_tables[:3])
    run_kernel("rotary", x, *tables, *sizes, *strides, is_backward, out, level=level)
    return out


def made(shape: Sequence[int], varying: Sequence[int] = (2,)) -> tuple[Tensor, Tensor, Tensor]:
    """Makes [batch, heads, positions, head_dim], as a view of positions before heads, and tables without symmetry."""
    torch.manual_seed(sum(shape))
    batch, positions, heads, dim = shape
    x = torch.randn(batch, positions, heads, dim).transpose(1, 2)
    table = [size if at in varying else 1 for at, size in enumerate(x.shape[:3])]
    return x, torch.randn(*table, dim), torch.randn(*table, dim)


@each_level
@pytest.mark.parametrize("varying", TABLES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(shape: Sequence[int], varying: Sequence[int], level: int) -> None:
    x, *tables = made(shape, varying)
    x.requires_grad_()
    eager, grad = expected(x, *tables), torch.randn_like(x)
    assert same_bits(ours(x.detach(), tables, level), eager.detach())
    assert same_bits(ours(grad, tables, level, is_backward=1), torch.autograd.grad(eager, x, grad)[0])


@each_level
def test_part_of_a_wider_row(level: int) -> None:
    x, *tables = made((2, 9, 3, 32))
    wide = torch.cat([x, x], -1)[..., 8:40]
    assert same_bits(ours(wide, tables, level), expected(wide, *tables))
