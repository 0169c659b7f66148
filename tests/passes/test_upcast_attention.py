"""Fused attention runs in single precision where its 16-bit kernels are slower, and becomes no less precise by it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import ort_accel
from tests.tiers import mostly_long

COUNTER = "fused attention in single precision"


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, causal: bool) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.dtype, self.causal = dtype, causal

    def forward(self, x, mask=None):
        batch, tokens, width = x.shape
        heads = self.project(x).to(self.dtype).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=self.causal)
        return mixed.transpose(1, 2).reshape(batch, tokens, width).float().square().mean()


def step(model, x, mask):
    model.zero_grad()
    loss = model(x, mask)
    loss.backward()
    return loss.detach(), model.project.weight.grad.clone()


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 0), (torch.bfloat16, 1), (torch.float16, 2)])
@pytest.mark.parametrize("case", mostly_long(["causal", "mask", "bool mask"], "mask"))
def test_results_are_at_least_as_precise_as_in_eager_mode(dtype, count, case):
    torch.manual_seed(0)
    eager = Attention(dtype, causal=case == "causal")
    precise = Attention(torch.float64, causal=case == "causal")
    precise.load_state_dict(eager.state_dict())
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"engine": {"fallback": "report"}})
    for tokens in (9, 12):
        x = torch.randn(3, tokens, 16)
        visible = torch.rand(3, 1, tokens, tokens) > 0.3
        visible[..., 0] = True
        masks = {"mask": torch.randn(3, 1, tokens, tokens).to(dtype), "bool mask": visible}
        mask = masks.get(case)
        wide = mask.double() if mask is not None and mask.dtype != torch.bool else mask
        right, given, expected = step(precise, x, wide), step(ours, x, mask), step(eager, x, mask)
        assert given[1].dtype == expected[1].dtype
        torch.testing.assert_close(given[0], expected[0], rtol=4 * torch.finfo(dtype).eps, atol=0)
        error, allowed = ((one[1] - right[1]).norm() for one in (given, expected))
        assert error <= 1.2 * allowed + 1e-6
    counters = ort_accel.report(ours).counters
    assert counters["compilations"] in (2, 4)  # for open sizes, and mostly for the first ones before
    cast = 0 if case == "bool mask" else count  # such a mask is looked at in each step, and so is the type
    assert counters[COUNTER] == cast * counters["compilations"] // 2


def test_attention_over_long_bfloat16_sequences_is_not_upcast():
    ours = ort_accel.accelerate(Attention(torch.bfloat16, causal=True), {"engine": {"fallback": "report"}})
    step(ours, torch.randn(1, 200, 16), None)
    assert not ort_accel.report(ours).counters[COUNTER]


def test_without_fusions_attention_is_not_upcast():
    wish = {"engine": {"fallback": "report"}, "compute": {"fusions": False}}
    ours = ort_accel.accelerate(Attention(torch.float16, causal=True), wish)
    step(ours, torch.randn(1, 8, 16), None)
    assert not ort_accel.report(ours).counters[COUNTER]
