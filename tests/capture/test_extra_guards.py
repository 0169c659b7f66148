"""Only what somebody else has put into PyTorch's classes counts as a replacement."""

from operator import attrgetter
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import ort_accel
from ort_accel.capture.extra_guards import _guarded, _is_replaced


def test_no_method_of_torch_itself_is_a_replacement():
    assert not [name for name in vars(Tensor) if not name.startswith("__") and _is_replaced(name)]


def test_a_model_that_detaches_is_captured():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            return (y * y.detach()).sum()

    ours = ort_accel.accelerate(Model(), {"version": 1})
    ours(torch.randn(3, 4)).backward()
    assert not ort_accel.report(ours).fallbacks
    assert ort_accel.report(ours).segments


def test_an_object_that_is_not_there_has_no_methods_to_guard():
    """Before torch 2.13, Dynamo guards the absence of an attribute by the attribute's own name."""

    class Builder:
        def get(self, guard):
            return attrgetter(guard.name)(torch)

    guards = [SimpleNamespace(name=name) for name in ("nn.Linear", "nn.NoSuchLayer", "", "Tensor")]
    assert list(_guarded(Builder(), guards)) == [nn.Linear, Tensor]
