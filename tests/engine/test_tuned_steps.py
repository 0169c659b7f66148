"""A model that measures first trains as in eager mode, and the next start measures nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import ort_accel
from ort_accel.reporting.report import State
from tests.against_eager import assert_step_as_eager, pair
from tests.tiers import mostly_long

FEATURE = "compute.tuning.enabled"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.LayerNorm(32))

    def forward(self, ids):
        return self.layers(self.embed(ids)).square().mean()


def settings(path, **engine):
    return {"engine": engine, "compute": {"tuning": {"enabled": True, "results": str(path)}}}


def batch(length):
    return torch.randint(0, 50, (4, length), generator=torch.Generator().manual_seed(length))


def test_steps_equal_eagers_whatever_was_chosen(tmp_path):
    torch.manual_seed(0)
    eager, ours = pair(Block(), settings(tmp_path / "tuning.json"))
    for length in (7, 9, 12):
        assert_step_as_eager(eager, ours, batch(length))
    report = ort_accel.report(ours)
    assert report.features[FEATURE].state is State.APPLIED
    assert {item.graph for item in report.races} == {"forward 0", "backward 0", "forward 1", "backward 1"}
    assert report.timings["tune"] > 0


def test_a_deterministic_run_repeats_what_was_measured_before(tmp_path):
    path = tmp_path / "tuning.json"
    torch.manual_seed(0)
    eager, measured = pair(Block(), settings(path))
    assert_step_as_eager(eager, measured, batch(7))
    torch.manual_seed(0)
    _, followed = pair(Block(), settings(path, deterministic=True))
    assert_step_as_eager(eager, followed, batch(7))
    first, second = ort_accel.report(measured), ort_accel.report(followed)
    assert second.features[FEATURE].state is State.APPLIED
    assert second.races == first.races
    assert [item.runner for item in second.segments] == [item.runner for item in first.segments]


def test_a_deterministic_run_without_a_file_says_why_it_does_not_measure():
    torch.manual_seed(0)
    eager, ours = pair(Block(), {"engine": {"deterministic": True}, "compute": {"tuning": {"enabled": True}}})
    assert_step_as_eager(eager, ours, batch(7))
    feature = ort_accel.report(ours).features[FEATURE]
    assert feature.state is State.REFUSED
    assert "engine.deterministic" in feature.reason


def test_measurements_are_kept_in_the_cache_where_no_file_is_named(tmp_path):
    wish = {"engine": {"cache_dir": str(tmp_path)}, "compute": {"tuning": {"enabled": True}}}
    for _ in range(2):
        torch.manual_seed(0)
        eager, ours = pair(Block(), wish)
        assert_step_as_eager(eager, ours, batch(7))
    assert (tmp_path / "tuning.json").exists()


@pytest.mark.parametrize("dropout", mostly_long([0.0, 0.1], 0.0))
def test_graphs_that_compute_only_some_rows_are_measured_too(dropout):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = BertForMaskedLM(BertConfig(vocab_size=40, **sizes, **rates))
    eager, ours = pair(model, {"compute": {"tuning": {"enabled": True}}})
    for lengths in ([12, 5, 3], [4, 12, 2]):
        mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(1, 40, mask.shape)
        labels = torch.where((ids % 3 == 0) & (mask > 0), ids, -100)
        assert_step_as_eager(eager, ours, input_ids=ids, attention_mask=mask, labels=labels)
    report = ort_accel.report(ours)
    assert report.features[FEATURE].state is State.APPLIED
    assert report.features["density.padding"].state is State.APPLIED
    subjects = {race.subject.split(" ")[0] for race in report.races if race.graph.startswith(("forward", "backward"))}
    assert {"the", "ort_accel.rows_of.default", "aten.addmm.default", "aten.mm.default"} <= subjects
