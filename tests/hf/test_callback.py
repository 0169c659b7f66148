"""ORTAccelCallback: the engine's numbers in the log, in a Trainer and in TRL's SFTTrainer."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode
from transformers import Trainer, set_seed

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.eager import comparison
from ort_accel.hf import ORTAccelCallback
from ort_accel.operators.flops import GraphFlops
from tests.hf.tiny import Listener, arguments, bert, llama, logged, losses, make, reviews, texts, train
from tests.hf.words import tokenizer

OFF = {"engine": {"enabled": False}}
"""Where the engine does nothing, figures go the same ways, and nothing is compiled."""
CAUSAL = {"train_dataset": texts(), "max_steps": 2}
WORK = {"ort/flops_per_s", "ort/mfu"}
NUMBERS = {"ort/step_time", "ort/tokens_per_s", "ort/density", "ort/peak_memory", "ort/fallbacks"}
WITHOUT_ENGINE = NUMBERS - {"ort/fallbacks"}


class Run(NamedTuple):
    """A training of two steps on the engine, which some tests look at."""

    trainer: Trainer
    folder: Path
    first_call: object
    counts: list[int]
    """An item for each time that operations were counted."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder, counts = tmp_path_factory.mktemp("run"), []
    count = GraphFlops.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "why_not", lambda *_: "switched off for tests")
        patch.setattr(GraphFlops, "__call__", lambda *given: counts.append(1) or count(*given))
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        set_seed(3)
        more = {"save_strategy": "steps", "save_steps": 2, "report_to": ["tensorboard"]}
        trainer = make("callback", bert(), arguments(folder, max_steps=2, **more))
        call = trainer.model._compiled_call_impl
        trainer.train()
    return Run(trainer, folder, call, counts)


def test_each_line_of_the_training_log_has_the_engines_numbers(tmp_path):
    trainer = train("callback", tmp_path, gradient_accumulation_steps=2, max_steps=2, train_dataset=reviews()[1::2])
    for entry in logged(trainer):
        assert set(entry) >= NUMBERS
        assert entry["ort/density"] == 0.5
        assert entry["ort/tokens_per_s"] * entry["ort/step_time"] == pytest.approx(2 * 4 * 8 * 0.5)
        assert entry["ort/peak_memory"] > 1
    assert not any(key.startswith("ort/") for key in trainer.evaluate())


def test_fallbacks_are_those_of_the_report(run):
    counted = sum(item.count for item in ort_accel.report(run.trainer.model).fallbacks if not item.reason.is_choice)
    assert logged(run.trainer)[-1]["ort/fallbacks"] == counted


def test_metrics_that_a_batch_does_not_give_are_left_out(tmp_path):
    unmasked = [{key: row[key] for key in ("input_ids", "labels")} for row in reviews()]
    entry = logged(train("callback", tmp_path, max_steps=1, train_dataset=unmasked, config=OFF))[-1]
    assert "ort/density" not in entry
    assert entry["ort/tokens_per_s"] * entry["ort/step_time"] == pytest.approx(4 * 8)


def test_operations_are_counted_from_the_graphs(tmp_path):
    """All rows are computed, so that eager mode's count of a batch is the same."""
    config = {"density": {"labels": False, "padding": False}}
    lines = logged(train("callback", tmp_path, partial(llama, attn_implementation="eager"), config=config, **CAUSAL))
    with FlopCounterMode(display=False) as counter:
        batch = {"input_ids": torch.ones(4, 8, dtype=torch.long), "attention_mask": torch.ones(4, 8)}
        llama(attn_implementation="eager")(**batch, labels=batch["input_ids"]).loss.backward()
    for line in lines:
        assert line["ort/flops_per_s"] * line["ort/step_time"] == pytest.approx(counter.get_total_flops(), rel=1e-6)
        assert 0 < line["ort/mfu"] < 1


def test_operations_are_not_counted_where_nobody_asks_or_eager_mode_ran(tmp_path, compared_with_eager):
    assert not WORK & set(logged(train("callback", tmp_path, max_steps=1))[-1])  # a small model begins in eager mode


def test_operations_are_not_counted_without_metrics(tmp_path, monkeypatch, run):
    assert len(run.counts) >= 2
    asked = []
    monkeypatch.setattr(GraphFlops, "__call__", lambda *_: asked.append(1) or 1)
    train("callback", tmp_path, max_steps=1, config={"observe": {"metrics": "none"}})
    assert asked == []


def test_a_switched_off_engine_has_no_fallbacks_to_count(tmp_path):
    entry = logged(train("callback", tmp_path, max_steps=1, config=OFF))[-1]
    assert NUMBERS - set(entry) == {"ort/fallbacks"}


def test_the_numbers_reach_what_the_trainer_reports_to(run):
    events = EventAccumulator(str(run.folder / "events"))
    events.Reload()
    for name in NUMBERS | WORK:
        assert [event.step for event in events.Scalars(f"train/{name}")] == [1, 2]


def of_engine(lines):
    return {key for line in lines for key in line if key.startswith("ort/")}


def test_a_checkpoint_does_not_keep_figures_that_no_second_run_would_have(run):
    state = json.loads((run.folder / "checkpoint-2" / "trainer_state.json").read_text())
    assert of_engine(logged(run.trainer)) >= NUMBERS
    assert not of_engine(run.trainer.state.log_history)
    assert not of_engine(state["log_history"])


def test_a_resumed_training_has_the_history_of_one_that_went_through(tmp_path):
    whole = train("callback", tmp_path, max_steps=4, save_strategy="steps", save_steps=2, config=OFF)
    resumed = train("callback", tmp_path, max_steps=4, resume=str(tmp_path / "checkpoint-2"), config=OFF)
    for before, after in zip(whole.state.log_history[:4], resumed.state.log_history[:4], strict=True):
        assert after == pytest.approx(before, abs=1e-6)


def test_the_history_keeps_the_figures_where_the_configuration_says_so(tmp_path):
    trainer = train("callback", tmp_path, max_steps=2, config={**OFF, "observe": {"metrics": "history"}})
    assert of_engine(trainer.state.log_history) == of_engine(logged(trainer)) >= WITHOUT_ENGINE


def test_the_log_has_no_figures_where_the_configuration_says_so(tmp_path):
    file = tmp_path / "report.json"
    config = {"engine": {"enabled": False}, "observe": {"metrics": "none", "report_file": str(file)}}
    trainer = train("callback", tmp_path, max_steps=2, config=config)
    assert not of_engine(logged(trainer))
    assert len(json.loads(file.read_text())["series"]["ort/step_time"]) == 2


def test_a_trainer_without_the_callback_logs_what_it_always_did(tmp_path):
    ORTAccelCallback()
    assert not of_engine(logged(train("eager", tmp_path)))


def test_a_subclass_of_trainer_keeps_its_own_loss(tmp_path):
    class Doubled(Trainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    def trained(*callbacks):
        set_seed(0)
        trainer = Doubled(bert(), arguments(tmp_path), train_dataset=reviews(), callbacks=list(callbacks))
        trainer.train()
        return losses(trainer)

    assert trained(ORTAccelCallback()) == pytest.approx(trained(), abs=1e-5)


def test_activation_happens_once(run):
    assert run.trainer.model._compiled_call_impl is run.first_call


def test_trls_sft_trainer_trains_as_in_eager(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": row["input_ids"][row["attention_mask"] > 0].tolist()} for row in texts()]
    set_seed(0)
    model = llama()

    def run(*callbacks):
        set_seed(0)
        args = arguments(tmp_path, trl.SFTConfig, max_length=8, bf16=False, gradient_checkpointing=False)
        trainer = trl.SFTTrainer(
            copy.deepcopy(model),
            args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=[Listener(), *callbacks],
        )
        trainer.train()
        return trainer

    eager, ours = run(), run(ORTAccelCallback())
    assert losses(ours) == pytest.approx(losses(eager), abs=1e-4)
    assert set(logged(ours)[-1]) >= NUMBERS
    assert ort_accel.report(ours.model).segments
    for name, tensor in eager.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_second_compiler_is_refused(tmp_path):
    args = arguments(tmp_path, torch_compile=True)
    with pytest.raises(OrtAccelError, match="a model has one compiler"):
        Trainer(bert(), args, train_dataset=reviews(), callbacks=[ORTAccelCallback()])
