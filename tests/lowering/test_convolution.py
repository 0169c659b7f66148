"""Convolutions stay with PyTorch's faster kernels, and say so; averages over windows equal eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from ort_accel.reporting.fallbacks import Reason
from tests.lowering.through_ort import Lowered, assert_like_eager

PICTURES = torch.arange(2 * 4 * 9 * 8, dtype=torch.float32).view(2, 4, 9, 8).sin()
KERNEL = torch.arange(6 * 4 * 3 * 3, dtype=torch.float32).view(6, 4, 3, 3).cos()


def test_convolutions_run_in_pytorch_because_it_is_faster():
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        y, backward = torch.func.vjp(functional.conv2d, x, w)
        return y, *backward(y)

    lowered = Lowered(function, [PICTURES, KERNEL])
    for op in ("aten.convolution.default", "aten.convolution_backward.default"):
        assert lowered.refusals[op].startswith(Reason.SLOWER_ELSEWHERE)
    torch.testing.assert_close(lowered(PICTURES, KERNEL), list(function(PICTURES, KERNEL)))


def test_nan_stays_the_largest_in_a_window():
    pictures = PICTURES.clone()
    pictures[0, 0, 0, 0] = torch.nan
    lowered = Lowered(lambda x: functional.max_pool2d(x, 2), [pictures])
    assert "NaN" in lowered.refusals["aten.max_pool2d_with_indices.default"]
    torch.testing.assert_close(lowered(pictures), [functional.max_pool2d(pictures, 2)], equal_nan=True)


@pytest.mark.parametrize(
    "how",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0), "count_include_pad": False},
    ],
    ids=str,
)
def test_averages_over_windows(how):
    assert_like_eager(lambda x: (functional.avg_pool2d(x, **how), functional.avg_pool2d(x[0], **how)), PICTURES)


def test_averages_in_one_and_three_dimensions():
    assert_like_eager(lambda x: functional.avg_pool1d(x, 3, 2, 1), PICTURES[0])
    assert_like_eager(lambda x: functional.avg_pool3d(x, 3, 2, 1), PICTURES[None])


def test_averages_pass_on_nan_and_infinity():
    pictures = PICTURES.clone()
    pictures[0, 0, 0, 0], pictures[1, 1, 1, 1] = torch.nan, torch.inf
    assert_like_eager(lambda x: functional.avg_pool2d(x, 3, 2, 1), pictures)


@pytest.mark.parametrize("how", [{"ceil_mode": True}, {"divisor_override": 3}], ids=str)
def test_windows_beyond_the_edge_and_other_divisors_are_left_to_pytorch(how):
    assert_like_eager(lambda x: functional.avg_pool2d(x, 2, **how), PICTURES, ort=False)


def test_a_changing_batch():
    lowered = Lowered(lambda x: functional.avg_pool2d(x, 2), [PICTURES], dynamic=True)
    assert not lowered.refusals
    for pictures in (PICTURES, PICTURES.repeat(3, 1, 1, 1)):
        torch.testing.assert_close(lowered(pictures), [functional.avg_pool2d(pictures, 2)])


def averaged_and_back(x, counts):
    pool = functional.adaptive_avg_pool2d if len(counts) == 2 else functional.adaptive_avg_pool3d
    y, backward = torch.func.vjp(lambda x: pool(x, counts), x)
    return y, *backward(y.sin())


@pytest.mark.parametrize("counts", [(3, 4), (9, 2), (1, 8), (2, 3, 4)], ids=str)
def test_averages_over_a_number_of_equal_windows(counts):
    assert_like_eager(lambda x: averaged_and_back(x, counts), PICTURES)
    assert_like_eager(lambda x: averaged_and_back(x, counts), PICTURES[:1] if len(counts) == 3 else PICTURES[0])


def test_averages_over_windows_of_several_sizes_are_left_to_pytorch():
    assert_like_eager(lambda x: averaged_and_back(x, (4, 3)), PICTURES, ort=False)
    lowered = Lowered(lambda x: averaged_and_back(x, (4, 3)), [PICTURES])
    assert "windows of several sizes" in lowered.refusals["aten._adaptive_avg_pool2d.default"]
    assert "windows of several sizes" in lowered.refusals["aten._adaptive_avg_pool2d_backward.default"]


def test_averages_over_windows_of_a_changing_batch():
    lowered = Lowered(lambda x: functional.adaptive_avg_pool2d(x, (3, 2)), [PICTURES], dynamic=True)
    for pictures in (PICTURES, PICTURES.repeat(3, 1, 1, 1)):
        torch.testing.assert_close(lowered(pictures), [functional.adaptive_avg_pool2d(pictures, (3, 2))])
