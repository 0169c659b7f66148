"""The cross-entropy kernel against PyTorch's loss and its gradient, in double precision."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ort_accel.native.library import kernel
from tests.native.levels import assert_near, each_level, each_type

IGNORED = -100


class CrossEntropy(ctypes.Structure):
    """The struct of kernels/cross_entropy.h."""

    _fields_ = [
        ("scores", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "row_stride", "is_bfloat16")),
        ("targets", ctypes.c_void_p),
        ("ignored_target", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("smoothing", "z_loss", "soft_cap", "scale")),
        ("writes_gradients", ctypes.c_int64),
        ("grad", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("row_grads", "losses", "logsumexp")),
    ]


class Options(NamedTuple):
    """The options of a loss."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0
    scale: float = 1.0


def run(
    scores: Tensor, targets: Tensor, options: Options, level: int, row_grads: Tensor | None = None, writes: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns the losses and the logarithms of the sums; the gradients stand in `scores`."""
    losses, logsumexp = torch.full((2, scores.shape[0]), 7.0)
    grads = None if row_grads is None else row_grads.data_ptr()
    given = CrossEntropy(
        scores.data_ptr(), *scores.shape, scores.stride(0), scores.dtype == torch.bfloat16, targets.data_ptr(), IGNORED,
        *options, writes, 0.5, grads, losses.data_ptr(), logsumexp.data_ptr(),
    )  # fmt: skip
    kernel("cross_entropy", ctypes.c_void_p, level=level)(ctypes.addressof(given))
    return losses, logsumexp


def expected(scores: Tensor, targets: Tensor, options: Options, row_grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns losses, logarithms of sums and gradients."""
    raw = scores.double().detach().requires_grad_()
    used = raw * options.scale
    if options.soft_cap:
        used = (used / options.soft_cap).tanh() * options.soft_cap
    losses = functional.cross_entropy(
        used, targets, ignore_index=IGNORED, label_smoothing=options.smoothing, reduction="none"
    )
    sums = used.logsumexp(-1).masked_fill(targets == IGNORED, 0)
    losses = losses + options.z_loss * sums.square()
    return losses.detach(), sums.detach(), torch.autograd.grad(losses, raw, row_grads.double())[0]


def operands(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scores with room between rows, targets of which some are ignored, and gradients of the losses."""
    torch.manual_seed(columns)
    scores = (torch.randn(rows, columns + 3) * 4).to(dtype)[:, :columns]
    targets = torch.randint(columns, (rows,))
    targets[1::3] = IGNORED
    return scores, targets, torch.randn(rows)


EVERY_OPTION = Options(0.1, 1e-2, 5.0, 0.7)


@each_level
@each_type
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 33, 100, 30_522])
@pytest.mark.parametrize("options", [Options(), EVERY_OPTION], ids=["plain", "all"])
def test_sizes(columns: int, options: Options, dtype: torch.dtype, level: int) -> None:
    scores, targets, row_grads = operands(7, columns, dtype)
    losses, sums, grads = expected(scores, targets, options, row_grads)
    found = run(scores, targets, options, level, row_grads)
    assert_near(found[0], losses, torch.float32)
    assert_near(found[1], sums, torch.float32)
    assert_near(scores, grads, dtype)


@each_level
@pytest.mark.parametrize("name", Options._fields)
def test_each_option(name: str, level: int) -> None:
    options = Options()._replace(**{name: getattr(EVERY_OPTION, name)})
    scores, targets, _ = operands(40, 777, torch.float32)
    losses, _, grads = expected(scores, targets, options, torch.full((40,), 0.5))
    found, _ = run(scores, targets, options, level)
    assert_near(found, losses, torch.float32)
    assert_near(scores, grads, torch.float32)


@each_level
@each_type
def test_without_gradients_or_rows(dtype: torch.dtype, level: int) -> None:
    scores, targets, row_grads = operands(6, 50, dtype)
    before = scores.clone()
    losses, _ = run(scores, targets, Options(), level, writes=False)
    assert_near(losses, expected(before, targets, Options(), row_grads)[0], torch.float32)
    assert torch.equal(scores, before)
    assert run(scores[:0], targets[:0], Options(), level)[0].numel() == 0


@each_level
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("columns", [5, 40])
def test_not_a_number_and_infinities(number: float, columns: int, level: int) -> None:
    scores, targets, row_grads = torch.randn(3, columns), torch.tensor([0, 1, 2]), torch.ones(3)
    scores[1, 3] = number
    scores[2, :2] = -torch.inf
    losses, _, grads = expected(scores, targets, Options(), row_grads)
    assert_near(run(scores, targets, Options(), level)[0], losses, torch.float32)
    assert_near(scores, 0.5 * grads, torch.float32)


@each_level
def test_a_target_that_is_no_column_gives_no_number(level: int) -> None:
    scores = torch.randn(3, 10)
    losses, _ = run(scores, torch.tensor([1, 10, -1]), Options(), level)
    assert losses.isnan().tolist() == scores.isnan().all(1).tolist() == [False, True, True]
