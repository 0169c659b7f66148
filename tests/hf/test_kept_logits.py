"""Logits that a Trainer's code or a loop with accelerate keeps are those of their step, as in eager mode."""

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback, set_seed

import ort_accel
from ort_accel.eager.rerun import CallInputs
from ort_accel.hf import ORTAccelCallback
from ort_accel.reporting.report import State
from tests.hf.tiny import arguments, llama, losses, texts, train
from tests.tiers import mostly_long

QUIET = {"observe": {"log_level": "error"}}


class Keeping(Trainer):
    """Keeps what each step gave, and looks at it behind the optimizer's step, in a callback, and at the end."""

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        self.kept.append(outputs.logits.detach())
        self.last = outputs
        return (loss, outputs) if return_outputs else loss


class Looking(TrainerCallback):
    def __init__(self, trainer):
        self.trainer, self.seen = trainer, []

    def on_step_end(self, args, state, control, **_):
        if state.global_step % 2 == 0:
            self.seen.append(self.trainer.last.logits.argmax(-1))


@pytest.mark.parametrize("accumulated", [1, pytest.param(2, marks=pytest.mark.long)])
def test_logits_that_a_trainer_keeps_equal_eagers(tmp_path, accumulated):
    results = []
    for callbacks in ([], [ORTAccelCallback(QUIET)]):
        set_seed(3)
        args = arguments(tmp_path, max_steps=3, gradient_accumulation_steps=accumulated)
        trainer = Keeping(llama(), args, train_dataset=texts(), callbacks=callbacks)
        trainer.kept, looking = [], Looking(trainer)
        trainer.add_callback(looking)
        trainer.train()
        results.append((torch.cat(trainer.kept), torch.cat(looking.seen), torch.tensor(losses(trainer))))
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)


def test_a_trainer_that_reads_no_logits_copies_and_computes_nothing(tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(CallInputs, "keep", lambda *_: copied.append("weights"))
    trainer = train("callback", tmp_path, llama, train_dataset=texts(), config=QUIET, max_steps=3)
    assert not copied
    assert ort_accel.report(trainer.model).features["compute.loss_only"].state is State.APPLIED


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize("gather", mostly_long(["gather", "gather_for_metrics", "held"], "gather_for_metrics", "held"))
def test_a_loop_with_accelerate(precision, gather):
    results = []
    for engine in (False, True):
        set_seed(3)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = llama()
        if engine:
            ort_accel.accelerate(model, QUIET)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = [{name: torch.as_tensor(value) for name, value in row.items()} for row in texts(12)]
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        kept = []
        for batch in loader:
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            if gather != "held":
                kept.append(getattr(accelerator, gather)(outputs.logits.detach()))
            optimizer.step()
            optimizer.zero_grad()
            if gather == "held":
                kept.append(outputs.logits)
        results.append(torch.cat([each.detach() for each in kept]))
    loose = precision == "bf16"
    torch.testing.assert_close(*results, rtol=1e-3, atol=3e-2 if loose else 1e-4)
