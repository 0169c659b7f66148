"""Layers of decoders run as fused operators, whose kernels the sessions call, with the gradients of eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, GPTJConfig, GPTJForCausalLM, LlamaConfig, LlamaForCausalLM

import ort_accel
from ort_accel.native.library import native_library

VOCABULARY, LAYERS = 64, 2
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = SIZES | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def assert_steps_as_eager(model: nn.Module) -> ort_accel.Report:
    """Compares the gradients of two steps; returns the report."""
    eager = model.train()
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"engine": {"fallback": "error"}})
    for _ in range(2):
        ids = torch.randint(3, VOCABULARY, (2, 9))
        losses = [one(input_ids=ids, labels=ids, use_cache=False).loss for one in (eager, ours)]
        torch.testing.assert_close(losses[1], losses[0])
        for one, loss in zip((eager, ours), losses, strict=True):
            one.zero_grad()
            loss.backward()
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4 * float(other.grad.abs().max()))
    return ort_accel.report(ours)


@pytest.mark.parametrize(
    ("model", "config"), [(LlamaForCausalLM, LlamaConfig), (GemmaForCausalLM, GemmaConfig)], ids=["Llama", "Gemma"]
)
def test_a_decoder_runs_as_fused_operators(model: type[nn.Module], config: type) -> None:
    torch.manual_seed(0)
    report = assert_steps_as_eager(model(config(**DECODER)))
    counts = {"fused RMS norms": 2 * LAYERS + 1, "fused rotary embeddings": 2 * LAYERS, "fused gates": LAYERS}
    assert {name: report.counters[name] for name in counts} == counts
    called = {name for segment in report.segments for name in segment.ops if segment.runner == "onnxruntime"}
    names = {f"ort_accel.{name}.default" for name in ("rotary", "rotary_backward", "gated", "gated_backward")}
    assert names <= called
    kernels = report.coverage["backward"]["nodes_by_ort_accel_in_onnxruntime"]
    assert kernels >= 5 * LAYERS + 1 or native_library() is None


def test_pairs_of_neighbours_are_not_taken_for_halves() -> None:
    torch.manual_seed(0)
    model = GPTJForCausalLM(
        GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=16, attn_pdrop=0, **SIZES)
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert "fused rotary embeddings" not in assert_steps_as_eager(model).counters
