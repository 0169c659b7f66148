"""A model that is to be accelerated and cannot be stays as it was, and its report says why."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel import OrtAccelError, engine


def test_the_report_of_a_declined_model_has_the_reason():
    model = nn.Linear(2, 2)
    assert engine.decline(model, ort_accel.load_config(), "it is split") is model
    feature = ort_accel.report(model).features["engine"]
    assert (feature.state, feature.reason) == ("refused", "it is split")
    assert model(torch.ones(2)).requires_grad


def test_a_declined_model_is_plain_again():
    model = ort_accel.accelerate(nn.Linear(2, 2))
    assert engine.config_of(model) == ort_accel.load_config()
    engine.decline(model, ort_accel.load_config(), "it is split")
    assert engine.config_of(model) is None


def test_to_decline_is_an_error_where_nothing_may_be_left_to_pytorch():
    with pytest.raises(
        OrtAccelError, match=r"engine.fallback is error, and this Linear cannot be accelerated: it is split"
    ):
        engine.decline(nn.Linear(2, 2), ort_accel.load_config({"engine": {"fallback": "error"}}), "it is split")


def test_a_model_on_mps_is_refused_with_a_way_out():
    class OnMps(nn.Module):
        def parameters(self, recurse=True):
            return iter([SimpleNamespace(device=torch.device("mps"))])

    with pytest.raises(OrtAccelError, match=r"on mps, where no ONNX Runtime trains; move it to the CPU"):
        ort_accel.accelerate(OnMps())
