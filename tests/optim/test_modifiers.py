"""Slow checks are replaced where a trial shows equal answers, and left with a reason where not."""

import copy
import math
import sys
import types

import pytest
import torch
from torch import nn

from ort_accel.errors import OptimizerError
from ort_accel.optim import FP16_Optimizer, LossScale
from ort_accel.optim.modifiers import replace_checks
from tests.optim.frameworks import ApexScaler, FirstMegatronOptimizer, MegatronOptimizer, apex_optimizer


@pytest.fixture
def apex(monkeypatch):
    """Apex's registry of scalers, as `amp.initialize` fills it."""
    scaler = ApexScaler()
    module = types.SimpleNamespace(_amp_state=types.SimpleNamespace(loss_scalers=[scaler]))
    monkeypatch.setitem(sys.modules, "apex.amp._amp_state", module)
    return scaler


def mixed_params():
    torch.manual_seed(0)
    half = [nn.Parameter(torch.randn(shape, dtype=torch.float16)) for shape in [(3, 4), (5,), (2, 2)]]
    return [*half, nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2))]


def results(optimizer, params, scaler, backwards, without=()):
    """Gradients after some backwards between which nothing is cleared, as Apex handles them."""
    stash = optimizer._amp_stash
    generator = torch.Generator().manual_seed(3)
    for grads in backwards:
        for index, fp32 in enumerate(stash.all_fp32_from_fp32_params):
            stash.all_fp32_from_fp32_grad_stash[index] = fp32.grad
        for index, param in enumerate(params):
            noise = torch.randn(param.shape, generator=generator)
            param.grad = None if index in without else (noise * grads).to(param.dtype)
        optimizer._post_amp_backward(scaler)
    owners = [p for group in optimizer.param_groups for p in group["params"]]
    return [None if p.grad is None else p.grad.clone() for p in owners], scaler._has_overflow


@pytest.mark.parametrize("without", [(), (1, 4)])
def test_apex_unscales_and_accumulates_as_before(apex, without):
    params = mixed_params()
    theirs = results(apex_optimizer(params), params, copy.copy(apex), [1.0, 2.0], without)
    params = mixed_params()
    optimizer = apex_optimizer(params)
    assert FP16_Optimizer(optimizer) is optimizer
    mine = results(optimizer, params, copy.copy(apex), [1.0, 2.0], without)
    assert mine[1] == theirs[1] is False
    for ours, wanted in zip(mine[0], theirs[0], strict=True):
        assert (ours is None) == (wanted is None)
        if ours is not None:
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_apex_hears_of_an_overflow_if_its_scale_is_dynamic(apex, scale):
    params = mixed_params()
    optimizer = FP16_Optimizer(apex_optimizer(params))
    assert results(optimizer, params, copy.copy(apex), [scale])[1]
    params = mixed_params()
    optimizer = FP16_Optimizer(apex_optimizer(params))
    assert not results(optimizer, params, ApexScaler(dynamic=False), [scale])[1]


def test_a_trial_leaves_apex_as_it_was(apex):
    params = mixed_params()
    params[0].grad = torch.ones_like(params[0])
    optimizer = apex_optimizer(params)
    before = dict(apex.__dict__)
    FP16_Optimizer(optimizer)
    assert apex.__dict__ == before
    assert torch.equal(params[0].grad, torch.ones_like(params[0]))
    assert all(param.grad is None for param in params[1:])


def test_apex_with_its_own_kernels_or_without_masters_is_left(apex, monkeypatch):
    optimizer = apex_optimizer(mixed_params())
    monkeypatch.setattr(ApexScaler, "has_fused_kernel", True)
    with pytest.raises(OptimizerError, match=r"Apex made: Apex's own multi-tensor kernels are built"):
        FP16_Optimizer(optimizer)
    del optimizer._amp_stash.all_fp32_from_fp16_params
    with pytest.raises(OptimizerError, match="only opt_level O2 has them"):
        FP16_Optimizer(optimizer)


def test_megatrons_first_optimizer_checks_at_once():
    params = [nn.Parameter(torch.randn(3, dtype=torch.float16)) for _ in range(4)]
    optimizer = FirstMegatronOptimizer(params)
    replaced = replace_checks(optimizer)
    assert (replaced.maker, replaced.methods) == ("Megatron", ("has_overflow_serial",))
    for bad in (1.0, math.inf, -math.inf, math.nan):
        params[2].grad = torch.full_like(params[2], bad)
        optimizer._check_overflow()
        assert optimizer.overflow == (not math.isfinite(bad))


@pytest.mark.parametrize("shared", [(), (1,)])
@pytest.mark.parametrize("clip", [0.1, 1e6])
def test_megatron_clips_to_the_same_gradients(shared, clip):
    pairs = []
    for replace in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.zeros(shape)) for shape in [(3, 4), (5,), (2,)]]
        optimizer = MegatronOptimizer(params, shared)
        if replace:
            assert replace_checks(optimizer).methods == ("clip_grad_norm",)
            assert all(param.grad is None for param in params)
        for param in params:
            param.grad = torch.randn_like(param)
        norm = optimizer.clip_grad_norm(clip)
        pairs.append((norm, [param.grad for param in params]))
    assert pairs[0][0] == pytest.approx(pairs[1][0], rel=1e-6)
    torch.testing.assert_close(pairs[0][1], pairs[1][1], rtol=1e-6, atol=0)


def test_a_method_that_answers_otherwise_stays():
    class Other(MegatronOptimizer):
        def clip_grad_norm(self, clip_grad):
            return 3 * super().clip_grad_norm(clip_grad)

    optimizer = Other([nn.Parameter(torch.zeros(3))])
    with pytest.raises(OptimizerError, match=r"Megatron made: clip_grad_norm answered .* and ours .* in trial 0"):
        FP16_Optimizer(optimizer)
    assert "clip_grad_norm" not in vars(optimizer)


def test_a_method_that_fails_in_its_trial_stays():
    class Broken(MegatronOptimizer):
        def clip_grad_norm(self, clip_grad):
            raise RuntimeError("no such device")

    with pytest.raises(OptimizerError, match=r"could not be tried \(RuntimeError: no such device\)"):
        FP16_Optimizer(Broken([nn.Parameter(torch.zeros(3))]))


def test_a_second_call_changes_nothing():
    optimizer = MegatronOptimizer([nn.Parameter(torch.zeros(3))])
    FP16_Optimizer(optimizer)
    first = optimizer.clip_grad_norm
    assert FP16_Optimizer(optimizer) is optimizer
    assert optimizer.clip_grad_norm is first


def test_frameworks_bring_their_own_scale():
    with pytest.raises(OptimizerError, match="Megatron scales the loss itself"):
        FP16_Optimizer(MegatronOptimizer([nn.Parameter(torch.zeros(3))]), loss_scale=LossScale())


def test_a_pytorch_optimizer_belongs_to_no_framework():
    assert replace_checks(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)) is None
