"""Tensors that lie in memory in another order than their dimensions are, with sizes that change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.against_eager import assert_step_as_eager, compilations, pair


class Patches(nn.Module):
    """Two convolutions with a norm over the channels between them, as a ConvNeXt downsamples pictures."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        channels_last = self.first(x).permute(0, 2, 3, 1)
        return self.second(self.norm(channels_last).permute(0, 3, 1, 2)).sum()


@pytest.mark.parametrize(
    "order", [torch.contiguous_format, torch.channels_last], ids=["channels first", "channels last"]
)
def test_pictures_of_several_sizes_train_where_channels_lie_last(order: torch.memory_format) -> None:
    eager, ours = pair(Patches(), {"engine": {"dynamic_shapes": True, "compare_with_eager": False}})
    compiled = []
    for height, width in [(16, 20), (13, 30), (16, 20), (7, 4)]:
        pictures = torch.randn(2, 3, height, width).contiguous(memory_format=order)
        assert_step_as_eager(eager, ours, pictures)
        compiled.append(compilations(ours))
    assert len(set(compiled[1:])) == 1


@pytest.mark.parametrize("place", range(4))
def test_dimensions_with_one_entry_lie_anywhere_in_memory(place: int) -> None:
    """A wrong order of dimensions that are all of the same size raises no error."""

    class Biased(nn.Linear):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return (super().forward(x) + bias).sin().sum()

    eager, ours = pair(Biased(4, 4), {"engine": {"compare_with_eager": False}})
    bias = torch.randn(4, 4, 4).permute(2, 0, 1).unsqueeze(place)
    assert_step_as_eager(eager, ours, torch.randn(4, 4, 4, 4), bias)
