"""Changes around a model, of classes, functions and settings, take effect from the next step on, as in eager mode."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ort_accel.reporting.report import State
from tests.against_eager import pair, report
from tests.engine import changes
from tests.engine.changes import (
    BATCH,
    REGISTRY,
    SWITCH,
    Block,
    Change,
    Net,
    Part,
    Settings,
    assert_as_eager,
    assert_followed,
    done_and_undone,
    doubling,
    entry_of,
    helper,
    pair_of_nets,
    setting,
)
from tests.tiers import mostly_long


def made(factor):
    def scale(x):
        return x * factor

    return scale


class DoublesGelu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.gelu else result


class DoublesTanh(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.gelu.default else result


def code_of(function, other) -> AbstractContextManager:
    before = function.__code__
    return done_and_undone(
        lambda: setattr(function, "__code__", other.__code__), lambda: setattr(function, "__code__", before)
    )


def doubled_call(module, *args, **kwargs):
    result = _CALL(module, *args, **kwargs)
    return result * 2 if isinstance(module, Block) else result


_CALL = nn.Module.__call__


OF_THE_PROCESS: dict[str, Change] = {
    "forward_of_a_class": lambda _: patch.object(Block, "forward", doubling(Block.forward)),
    "forward_of_torch's_class": lambda _: patch.object(nn.Linear, "forward", doubling(nn.Linear.forward)),
    "call_of_a_class": lambda _: patch.object(Block, "__call__", doubled_call),
    "call_of_all_modules": lambda _: patch.object(nn.Module, "__call__", doubled_call),
    "an_inherited_method": lambda _: patch.object(Part, "mixed", lambda self, x: x * 2),
    "a_method_that_hides_another": lambda _: patch.object(Block, "mixed", lambda self, x: x * 2, create=True),
    "code_of_a_method": lambda _: code_of(Part.mixed, lambda self, x: x * 2),
    "a_property": lambda _: patch.object(Block, "gain", property(lambda self: 2.0)),
    "a_static_method": lambda _: patch.object(Block, "doubled", staticmethod(lambda x: x * 3)),
    "attribute_of_a_class": lambda _: patch.object(Part, "slope", 2.0),
    "method_of_another_class": lambda _: patch.object(Settings, "scaled", lambda self, x: x * 2),
    "method_of_the_model's_class": lambda _: patch.object(Net, "entry", lambda self, name: 2.0),
    "gelu": lambda _: patch.object(F, "gelu", doubling(F.gelu)),
    "linear": lambda _: patch.object(F, "linear", doubling(F.linear)),
    "layer_norm": lambda _: patch.object(F, "layer_norm", doubling(F.layer_norm)),
    "cross_entropy": lambda _: patch.object(F, "cross_entropy", doubling(F.cross_entropy)),
    "a_method_of_tensors": lambda _: patch.object(torch.Tensor, "atan", doubling(torch.Tensor.atan)),
    "a_function": lambda _: patch.object(changes, "helper", lambda x: x * 2),
    "code_of_a_function": lambda _: code_of(helper, lambda x, power=1.0, *, shift=0.0: x * 2),
    "defaults_of_a_function": lambda _: patch.object(helper, "__defaults__", (2.0,)),
    "a_constant": lambda _: patch.object(changes, "FACTOR", 2.0),
    "a_registered_function": lambda _: entry_of(REGISTRY, "scale", made(2.0)),
    "a_partial_function": lambda _: entry_of(REGISTRY, "scale", functools.partial(torch.mul, 2.0)),
    "environment": lambda _: patch.dict(os.environ, {SWITCH: "1"}),
    "a_function_mode": lambda _: DoublesGelu(),
    "a_dispatch_mode": lambda _: DoublesTanh(),
}


WITHOUT_EFFECT_HERE: dict[str, Change] = {
    "default_dtype": setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default_device": setting(torch.set_default_device, "cpu", None),
    "deterministic": setting(torch.use_deterministic_algorithms, True, False),
    "precision_of_products": setting(torch.set_float32_matmul_precision, "high", "highest"),
    "anomaly_detection": setting(torch.autograd.set_detect_anomaly, True, False),
    "flushed_denormals": setting(torch.set_flush_denormal, True, False),
    "kinds_of_attention": setting(torch.backends.cuda.enable_flash_sdp, False, True),
    "saved_on_cpu": lambda _: torch.autograd.graph.save_on_cpu(),
}
"""Settings of PyTorch that this model's numbers do not depend on, but what is compiled may."""


SHORT_OF_THE_PROCESS = (
    "forward_of_a_class",
    "forward_of_torch's_class",
    "call_of_all_modules",
    "an_inherited_method",
    "code_of_a_method",
    "a_property",
    "attribute_of_a_class",
    "method_of_another_class",
    "gelu",
    "a_method_of_tensors",
    "a_function",
    "defaults_of_a_function",
    "a_constant",
    "a_registered_function",
    "environment",
    "a_function_mode",
    "a_dispatch_mode",
)
"""Changes that `make test` makes: one of each mechanism by which the engine notices them."""


@pytest.fixture(scope="module")
def models() -> tuple[Net, Net]:
    return pair_of_nets()


@pytest.mark.parametrize("kind", mostly_long(OF_THE_PROCESS, *SHORT_OF_THE_PROCESS))
def test_a_change_around_the_model(kind, models):
    assert_followed(models, OF_THE_PROCESS[kind], of_the_process=True)


@pytest.mark.parametrize(
    "kind", mostly_long(WITHOUT_EFFECT_HERE, "default_dtype", "deterministic", "anomaly_detection", "saved_on_cpu")
)
def test_a_setting_of_pytorch(kind, models):
    assert_followed(models, WITHOUT_EFFECT_HERE[kind], of_the_process=True, has_effect=False)


def test_sessions_follow_pytorch(monkeypatch):
    """Sessions of what is compiled later run as PyTorch is set then."""
    eager, ours = pair(Net())
    assert_as_eager(eager, ours)
    assert report(ours).features["engine.deterministic"].state is State.OFF
    with setting(torch.use_deterministic_algorithms, True, False)(ours):
        assert_as_eager(eager, ours)
        assert report(ours).features["engine.deterministic"].state is State.APPLIED
    with setting(torch.set_num_threads, 1, torch.get_num_threads())(ours):
        assert_as_eager(eager, ours)
        assert " 1 threads" in report(ours).features["engine"].effect


def test_tangents_of_forward_mode():
    """Forward-mode differentiation, which compiled graphs know nothing of."""
    eager, ours = pair(Net())
    assert_as_eager(eager, ours)
    found = []
    for model in (eager, ours):
        model.eval()
        with forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(value.detach(), value.detach()) for name, value in model.named_parameters()
            }
            found.append(forward_ad.unpack_dual(functional_call(model, duals, BATCH)[0]))
    assert found[0].tangent is not None
    torch.testing.assert_close(tuple(found[1]), tuple(found[0]))
