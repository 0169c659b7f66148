"""The sweep over architectures: what it makes is tiny, what matches it says matches, and what does not it finds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import model_sweep
from benchmarks.model_sweep import Verdict, check
from benchmarks.sweep_tasks import TASKS
from benchmarks.sweep_ways import WAYS, rough_difference
from benchmarks.tiny_models import MOST_PARAMETERS, tiny
from tests.tiers import mostly_long

SAMPLE = [
    ("causal", "llama", "LlamaForCausalLM"),
    ("seq2seq", "t5", "T5ForConditionalGeneration"),
    ("images", "swin", "SwinForImageClassification"),
    ("answers", "bert", "BertForQuestionAnswering"),
    ("choice", "roberta", "RobertaForMultipleChoice"),
    ("speech", "wav2vec2", "Wav2Vec2ForCTC"),
]


@pytest.mark.parametrize(("task", "kind", "name"), SAMPLE)
def test_a_tiny_model_of_each_task_trains(task: str, kind: str, name: str) -> None:
    assert (kind, name) in TASKS[task].classes()
    model = tiny(kind, name, TASKS[task].labels)
    assert sum(parameter.numel() for parameter in model.parameters()) < MOST_PARAMETERS / 10
    for rows, length in TASKS[task].sizes:
        loss = model(**TASKS[task].batch(model, rows, length)).loss
        loss.backward()
        assert loss.isfinite()


def test_a_model_that_trains_as_in_eager_mode_matches() -> None:
    outcome = check("masked", "bert", "BertForMaskedLM")
    assert (outcome.verdict, outcome.detail) == (Verdict.MATCH, "")
    assert outcome.compilations == 4
    assert outcome.late == 0
    assert not outcome.breaks


def test_what_cannot_be_made_is_not_compared() -> None:
    outcome = check("masked", "perceiver", "PerceiverForMaskedLM")
    assert outcome.verdict is Verdict.NOT_BUILT
    assert "not tiny" in outcome.detail


@pytest.mark.parametrize("fault", ["another number", "no gradient", "an error"])
def test_a_fault_of_the_engine_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def accelerate(model: nn.Module, _: object) -> nn.Module:
        bias = model.cls.predictions.bias
        if fault == "another number":
            bias.register_hook(lambda gradient: gradient * 1.01)
        elif fault == "no gradient":
            bias.requires_grad_(False)
        else:
            model.forward = None  # type: ignore[assignment]
        return model

    monkeypatch.setattr(model_sweep.ort_accel, "accelerate", accelerate)
    monkeypatch.setattr(model_sweep.ort_accel, "report", lambda _: model_sweep.Report())
    outcome = check("masked", "bert", "BertForMaskedLM")
    assert outcome.verdict is (Verdict.ERROR if fault == "an error" else Verdict.MISMATCH)
    assert outcome.verdict.is_fault
    if outcome.verdict is Verdict.MISMATCH:
        assert "cls.predictions.bias" in outcome.detail


def test_what_rounding_grows_into_is_no_fault() -> None:
    class Chaotic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            x = x * self.weight
            for _ in range(12):
                x = 3.99 * x * (1 - x)
            return (x.sum(),)

    batch = {"x": torch.tensor([0.4, 0.7])}
    assert model_sweep._is_rounding(Chaotic(), WAYS["usual"], batch, model_sweep.QUIET)


@pytest.mark.parametrize("way", mostly_long(sorted(WAYS.keys() - {"usual"}), "autocast"))
def test_each_way_runs_a_model_on_the_engine(way: str) -> None:
    outcome = check("causal", "gpt2", "GPT2LMHeadModel", way=way)
    assert (outcome.verdict, outcome.detail) == (Verdict.MATCH, "")
    assert outcome.compilations >= 2


def test_a_smaller_type_may_be_off_by_rounding_only() -> None:
    exact = {"weight": torch.linspace(-1, 1, 1000), "bias": torch.zeros(2), "unused": None}
    eager = {"weight": exact["weight"].bfloat16(), "bias": torch.full((2,), 1e-4), "unused": None}
    assert not rough_difference(dict(eager, bias=torch.full((2,), -3e-4)), eager, exact)
    assert "weight: 1.8" in rough_difference(dict(eager, weight=(exact["weight"] * 0.9).bfloat16()), eager, exact)
    assert "bias" in rough_difference(dict(eager, bias=torch.full((2,), 0.1)), eager, exact)
    assert "unused has a value" in rough_difference(dict(eager, unused=torch.zeros(1)), eager, exact)
    assert "weight: torch.float32" in rough_difference(dict(eager, weight=exact["weight"]), eager, exact)
    assert rough_difference(dict(eager, weight=exact["weight"].bfloat16() * torch.nan), eager, exact)
