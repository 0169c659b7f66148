"""Batches that no tutorial shows, on models of transformers: the engine does what eager does, be it NaN or an error."""

import pytest
import torch
from transformers import TrainerCallback, set_seed

import ort_accel
from tests.against_eager import ATOL, RTOL, compilations, pair, step
from tests.hf.tiny import arguments, bert, llama, losses, make
from tests.tiers import mostly_long

NAN = float("nan")


def tokens(rows, length):
    return torch.randint(3, 32, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length))


def batch(rows, length, **more):
    ids = tokens(rows, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(), **more}


def padded(rows, length, kept):
    mask = (torch.arange(length) < kept).long().repeat(rows, 1)
    return batch(rows, length, attention_mask=mask, labels=tokens(rows, length).masked_fill(mask == 0, -100))


def with_gaps(rows, length):
    """Every second column of a wider tensor, and a transposed one."""
    wide = tokens(rows, 2 * length)
    return batch(rows, length, input_ids=wide[:, ::2], attention_mask=torch.ones(length, rows, dtype=torch.long).t())


LIKE_OTHERS = {
    "usual": batch(4, 8),
    "another length": padded(4, 11, kept=6),
    "odd sizes": batch(3, 13),
    "as long as wide": batch(5, 5),
    "no valid label": batch(2, 6, labels=torch.full((2, 6), -100)),
    "all padded": padded(2, 6, kept=0),
}
"""Two shapes, and what needs nothing compiled behind them."""

ON_THEIR_OWN = {
    "one row of one token": batch(1, 1),
    "gaps in memory": with_gaps(3, 6),
    "no rows": batch(0, 6),
    "usual again": batch(4, 8),
}
"""What PyTorch captures for itself: sizes of 0 and 1, and inputs that lie in memory in another way."""


def classified(batch, label=None):
    """The same batch for a model that gives each row one label."""
    rows = batch["input_ids"].shape[0]
    labels = torch.full((rows,), -100) if bool((batch["labels"] == -100).all()) else torch.arange(rows) % 2
    return {**batch, "labels": labels if label is None else torch.full((rows,), label)}


def outcome(model, batch):
    """Loss and gradients of a step, or the kind of error that it raises."""
    try:
        return step(model, **batch)
    except Exception as error:
        return type(error)


def assert_same_outcome(ours, eager, name):
    if isinstance(eager, type):
        assert issubclass(ours, eager), name
        return
    torch.testing.assert_close(
        (ours.loss, ours.gradients),
        (eager.loss, eager.gradients),
        rtol=RTOL,
        atol=ATOL,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )
    assert torch.equal(ours.random, eager.random), f"{name}: other random numbers were drawn"


MODELS = {
    "a classifier": lambda: bert(problem_type="single_label_classification"),
    "a decoder with tied weights": lambda: llama(tie_word_embeddings=True),
}


@pytest.mark.parametrize("kind", mostly_long(MODELS, "a decoder with tied weights"))
def test_odd_batches_give_what_they_give_in_eager(kind):
    set_seed(0)
    eager, ours = pair(MODELS[kind]())
    for name, odd in {**LIKE_OTHERS, **ON_THEIR_OWN}.items():
        sized = classified(odd) if kind == "a classifier" else odd
        assert_same_outcome(outcome(ours, sized), outcome(eager, sized), name)
        if name in LIKE_OTHERS:
            assert compilations(ours) <= 4, name
    assert ort_accel.report(ours).segments, "nothing ran on the engine"


def test_labels_that_are_not_numbers_give_losses_that_are_not():
    set_seed(0)
    eager, ours = pair(bert(num_labels=1, problem_type="regression"))
    for label in (0.5, NAN):
        odd = classified(batch(4, 8), label)
        expected = outcome(eager, odd)
        assert expected.loss.isnan() == (label != label)
        assert_same_outcome(outcome(ours, odd), expected, label)


class Thaw(TrainerCallback):
    """Lets the encoder learn from the third step on, and no longer from the fifth on."""

    def on_step_begin(self, args, state, control, model=None, **_):
        model.bert.requires_grad_(state.global_step in (2, 3))


@pytest.mark.parametrize("side", mostly_long(["ORTTrainer", "callback"], "callback"))
def test_parameters_that_thaw_during_training_learn_then(tmp_path, side):
    def run(which):
        set_seed(0)
        model = bert(problem_type="single_label_classification")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        args = arguments(tmp_path, max_steps=6)
        trainer = make(which, model, args, callbacks=[Thaw()], optimizers=(optimizer, None))
        trainer.train()
        return losses(trainer), trainer.model.bert.encoder.layer[0].output.dense.weight

    expected, eager_weight = run("eager")
    got, weight = run(side)
    assert got == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(weight, eager_weight, rtol=1e-3, atol=1e-5)
