"""RMS norms, in the forms in which models write them, are one operator with eager's results and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import ort_accel
from tests.tiers import mostly_long

NAME = "fused RMS norms"
WIDTH = 24


class Unweighted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6) * x


class WithRead(nn.Module):
    """Its mean has a second reader."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + 1e-6) + mean


class OverRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6)


class ByAConstant(nn.Module):
    """Its factor has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * factor


FUSED: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: LlamaRMSNorm(WIDTH, 1e-5),
    "T5": lambda: T5LayerNorm(WIDTH),
    "Gemma 2": lambda: Gemma2RMSNorm(WIDTH),
    "without a weight": Unweighted,
}


def models(norm: nn.Module, native: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 3))
    for parameter in eager[1].parameters():
        nn.init.normal_(parameter)
    return eager, ort_accel.accelerate(copy.deepcopy(eager), {"compute": {"native": native}})


def assert_equal_steps(eager: nn.Module, ours: nn.Module) -> None:
    for rows in (4, 7, 1):
        x = torch.randn(rows, 5, WIDTH)
        for model in (eager, ours):
            model.zero_grad()
            model(x).square().sum().backward()
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4 * float(other.grad.abs().max()))


@pytest.mark.parametrize(
    ("name", "native"), mostly_long(product(FUSED, (True, False)), *product(FUSED, (True,)), (next(iter(FUSED)), False))
)
def test_a_norm_is_one_operator_with_eagers_gradients(name, native):
    eager, ours = models(FUSED[name](), native)
    assert_equal_steps(eager, ours)
    assert ort_accel.report(ours).counters[NAME] > 0


def test_a_frozen_weight_has_no_gradient():
    eager, ours = models(LlamaRMSNorm(WIDTH, 1e-5), native=True)
    for model in (eager, ours):
        model[1].weight.requires_grad_(False)
    assert_equal_steps(eager, ours)
    assert ours[1].weight.grad is None
    assert ort_accel.report(ours).counters[NAME] > 0


@pytest.mark.parametrize("norm", [WithRead, OverRows, Cubed, ByAConstant])
def test_what_is_no_such_norm_stays_as_it_is(norm):
    eager, ours = models(norm(), native=True)
    assert_equal_steps(eager, ours)
    assert NAME not in ort_accel.report(ours).counters


def test_a_norm_of_halves_multiplies_by_its_weight_in_halves():
    eager, ours = models(LlamaRMSNorm(WIDTH, 1e-5), native=True)
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    for model in (eager, ours):
        model.to(torch.bfloat16)
    torch.testing.assert_close(ours(x), eager(x), rtol=2e-2, atol=2e-2)
    assert ort_accel.report(ours).counters[NAME] == 1, "the part in single precision"


def test_operators_without_readers_stay():
    class InVmap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LlamaRMSNorm(WIDTH, 1e-5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(torch.mul)(self.norm(x), x)

    eager, ours = models(InVmap(), native=True)
    assert_equal_steps(eager, ours)
    assert ort_accel.report(ours).counters[NAME] > 0
