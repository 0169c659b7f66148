"""Calls that run in PyTorch although the model is accelerated: steps of `generate`, and traces by others."""

from __future__ import annotations

import copy

import torch
from torch import nn

import ort_accel
from tests.against_eager import compilations
from tests.hf import tiny


def test_generate_compiles_nothing() -> None:
    eager = tiny.llama()
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"engine": {"compile_evaluation": True}})
    ids = torch.randint(3, 30, (2, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    assert compilations(ours) == 0
    with torch.no_grad():
        ours(input_ids=ids, use_cache=False)
    assert compilations(ours) > 0, "an evaluation without a cache is compiled"


def test_torch_jit_traces_an_accelerated_model() -> None:
    eager = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    x = torch.randn(4, 6)
    torch.testing.assert_close(torch.jit.trace(ours, x)(x), eager(x))
