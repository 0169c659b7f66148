"""`observe.activation_statistics` in a Trainer, on the engine and without it."""

import pytest
import torch
from transformers import Trainer, TrainingArguments, set_seed

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.hf import ORTAccelCallback, ORTTrainer
from ort_accel.reporting.report import State
from ort_accel.subscribers.comparison import compare, first_divergence


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, values, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.linear(values), labels)}


def arguments(tmp_path):
    return TrainingArguments(
        str(tmp_path / "out"), use_cpu=True, max_steps=3, save_strategy="no", disable_tqdm=True, report_to=[]
    )


def config(folder, **more):
    return {"observe": {"activation_statistics": {"output_dir": str(folder), "start_step": 1}}, **more}


DATA = [{"values": torch.tensor([1.0, float(n), 2.0]), "labels": n % 2} for n in range(24)]


def test_a_run_on_the_engine_agrees_with_a_run_without_it(tmp_path):
    eager, engine = tmp_path / "eager", tmp_path / "engine"
    set_seed(1)
    off = ORTAccelCallback(config(eager, engine={"enabled": False}))
    Trainer(Model(), arguments(tmp_path), train_dataset=DATA, callbacks=[off]).train()
    set_seed(1)
    model = Model()
    ORTTrainer(model, arguments(tmp_path), train_dataset=DATA, ort_config=config(engine)).train()
    differences = compare(eager, engine)
    assert first_divergence(differences, 1e-3) is None
    assert {(item.step, item.module) for item in differences} == {(s, m) for s in (1, 2) for m in ("", "linear")}
    assert ort_accel.report(model).features["observe.activation_statistics"].state is State.APPLIED
    assert not model.linear._forward_hooks


def test_a_folder_that_cannot_be_used_stops_training_before_its_first_step(tmp_path):
    (tmp_path / "file").touch()
    trainer = ORTTrainer(Model(), arguments(tmp_path), train_dataset=DATA, ort_config=config(tmp_path / "file"))
    with pytest.raises(OrtAccelError, match="cannot be written"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_in_a_plain_training_loop_the_report_says_what_to_do(tmp_path):
    model = ort_accel.accelerate(Model(), config(tmp_path))
    feature = ort_accel.report(model).features["observe.activation_statistics"]
    assert feature.state is State.REFUSED
    assert "StatisticsSubscriber" in feature.reason


def test_an_interrupted_training_leaves_no_hooks_beside_the_next_one(tmp_path):
    class Interrupted(Model):
        def forward(self, values, labels):
            if interrupts:
                raise KeyboardInterrupt
            return super().forward(values, labels)

    recorded = config(tmp_path / "statistics")
    recorded["observe"]["activation_statistics"]["override_output_dir"] = True
    model = Interrupted()
    trainer = ORTTrainer(model, arguments(tmp_path), train_dataset=DATA, ort_config=recorded)
    interrupts = True
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    interrupts = False
    trainer.train()
    assert not model.linear._forward_hooks
