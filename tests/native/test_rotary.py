"""The rotary embedding against the formulas of Hugging Face's models, in double precision, and autograd's gradient."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ort_accel.native.library import kernel
from tests.native.levels import assert_near, each_level, each_type

_THREE = ctypes.c_int64 * 3


class RotaryRows(ctypes.Structure):
    """The struct of the same name in kernels/rotary.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "target")),
        ("heads", ctypes.c_int64),
        *((name, _THREE) for name in ("source_strides", "target_strides")),
    ]


class Rotary(ctypes.Structure):
    """The struct of kernels/rotary.h."""

    _fields_ = [
        *((name, RotaryRows) for name in ("query", "key")),
        *((name, ctypes.c_int64) for name in ("batch", "positions", "dim", "head_dim", "is_bfloat16")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
        ("table_strides", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("table_is_bfloat16", "is_interleaved", "is_backward")),
    ]


class Case(NamedTuple):
    """Queries and keys as [batch, positions, heads, head_dim], and the tables."""

    query: Tensor
    key: Tensor
    cosines: Tensor
    sines: Tensor
    is_interleaved: bool

    def run(self, level: int, is_backward: bool, in_place: bool = False) -> list[Tensor]:
        """Returns rotated queries and keys, as [batch, heads, positions, head_dim] unless in place."""
        pair = self.query.clone(), self.key.clone()
        results = pair if in_place else [torch.empty_like(one.transpose(1, 2)).transpose(1, 2) for one in pair]
        rows = [
            RotaryRows(one.data_ptr(), to.data_ptr(), one.shape[2], _THREE(*one.stride()[:3]), _THREE(*to.stride()[:3]))
            for one, to in zip(pair, results, strict=True)
        ]
        table = self.cosines
        strides = (ctypes.c_int64 * 2)(table.stride(0) if table.shape[0] > 1 else 0, table.stride(1))
        batch, positions, _, head_dim = self.query.shape
        given = Rotary(
            *rows, batch, positions, table.shape[-1], head_dim, self.query.dtype == torch.bfloat16, table.data_ptr(),
            self.sines.data_ptr(), strides, table.dtype == torch.bfloat16, self.is_interleaved, is_backward,
        )  # fmt: skip
        kernel("rotary", ctypes.c_void_p, level=level)(ctypes.addressof(given))
        return list(results)

    def expected(self, rows: Tensor) -> Tensor:
        """Returns the rotated rows."""
        dim = self.cosines.shape[-1]
        rotated, rest = rows[..., :dim], rows[..., dim:]
        if self.is_interleaved:
            turned = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
        else:
            turned = torch.cat((-rotated[..., dim // 2 :], rotated[..., : dim // 2]), -1)
        cosines, sines = (table.double().unsqueeze(2) for table in (self.cosines, self.sines))
        return torch.cat((rotated * cosines + turned * sines, rest), -1)


def make(dim: int, rest: int, dtype: torch.dtype, table_type: torch.dtype, batches: int, is_interleaved: bool) -> Case:
    """Makes random rows, and tables whose numbers all differ, so that no two can be confused."""
    torch.manual_seed(dim)
    query, key = (torch.randn(2, 9, heads, dim + rest).to(dtype) for heads in (4, 2))
    cosines, sines = (torch.randn(batches, 9, dim).to(table_type) for _ in range(2))
    return Case(query, key, cosines, sines, is_interleaved)


each_way = pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "neighbours"])


@each_level
@each_type
@each_way
@pytest.mark.parametrize(("dim", "rest"), [(0, 3), (2, 0), (6, 1), (16, 0), (34, 5), (64, 0), (80, 16), (128, 0)])
def test_forward_and_backward(dim: int, rest: int, dtype: torch.dtype, is_interleaved: bool, level: int) -> None:
    case = make(dim, rest, dtype, torch.float32, 1, is_interleaved)
    for found, rows in zip(case.run(level, False), (case.query, case.key), strict=True):
        assert_near(found, case.expected(rows.double()), dtype)
    for found, grad in zip(case.run(level, True), (case.query, case.key), strict=True):
        rows = torch.zeros_like(grad, dtype=torch.double).requires_grad_()
        assert_near(found, torch.autograd.grad(case.expected(rows), rows, grad.double())[0], dtype)


@each_level
@each_type
@each_way
@pytest.mark.parametrize("batches", [1, 2])
def test_tables_and_places(batches: int, dtype: torch.dtype, is_interleaved: bool, level: int) -> None:
    case = make(40, 8, dtype, torch.bfloat16, batches, is_interleaved)
    apart = case.run(level, False)
    for found, rows in zip(apart, (case.query, case.key), strict=True):
        assert_near(found, case.expected(rows.double()), dtype)
    assert all(map(torch.equal, case.run(level, False, in_place=True), apart))
