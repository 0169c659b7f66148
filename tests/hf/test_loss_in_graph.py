"""A loss that the Trainer computes is compiled with the model: the same numbers, and fewer rows."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

import ort_accel
from ort_accel import engine
from ort_accel.compiler.module_call import OutsideLoss
from ort_accel.errors import OrtAccelError
from ort_accel.hf import ORTTrainer
from ort_accel.hf.loss_in_graph import SmoothedLoss
from ort_accel.reporting.report import State
from tests.hf.tiny import arguments, bert, llama, losses, reviews, texts, train

KEY = "compute.loss_in_graph"


@pytest.mark.parametrize("count", [None, 7, torch.tensor(7)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_smoothed_loss_is_that_of_transformers(dtype, shifted, count):
    torch.manual_seed(0)
    scores, labels = torch.randn(3, 6, 5, dtype=dtype), torch.randint(0, 5, (3, 6))
    labels[:, 4:] = -100
    ours = SmoothedLoss(0.1, -100, shifted)({"logits": scores}, labels, count)
    theirs = LabelSmoother(0.1)({"logits": scores.double()}, labels, shifted, count)
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-6, atol=1e-6)


def weighted(outputs, labels, num_items_in_batch=None):
    scores = outputs.logits[..., :-1, :].reshape(-1, outputs.logits.shape[-1])
    total = cross_entropy(scores, labels[..., 1:].reshape(-1), reduction="sum")
    return total / num_items_in_batch + 0.01 * scores.logsumexp(-1).mean()


CASES = {
    "label smoothing": {"build": bert, "label_smoothing_factor": 0.2},
    "compute_loss_func": {"build": llama, "compute_loss_func": weighted, "train_dataset": texts(), "max_steps": 3},
    "label smoothing, shifted, accumulated": {
        "build": llama,
        "label_smoothing_factor": 0.2,
        "train_dataset": texts(),
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_eagers_with_the_loss_in_the_graph(case, tmp_path):
    eager = train("eager", tmp_path, **CASES[case])
    ours = train("ORTTrainer", tmp_path, **CASES[case])
    assert losses(ours) == pytest.approx(losses(eager), rel=1e-4)
    for given, wanted in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-3, atol=1e-5)
    found = ort_accel.report(ours.model).features[KEY]
    name = "compute_loss_func" if case == "compute_loss_func" else "label_smoother"
    assert found.effect == f"the Trainer's {name} is compiled together with the model"


def test_rows_without_a_label_are_not_computed(tmp_path):
    config = {"density": {"labels": True}}
    ours = train(
        "ORTTrainer", tmp_path, llama, label_smoothing_factor=0.1, train_dataset=texts(), config=config, max_steps=1
    )
    assert ort_accel.report(ours.model).features["density.labels"].state is State.APPLIED


def test_the_loss_is_among_the_outputs_where_ddp_looks_for_it():
    model = ort_accel.accelerate(bert())
    loss = OutsideLoss(SmoothedLoss(0.1, -100, is_shifted=False), (torch.tensor([0, 1]), None))
    with engine.together_with(model, loss):
        outputs = model(input_ids=torch.ones(2, 4, dtype=torch.long))
    assert outputs["loss"] is loss.value
    assert outputs.loss.requires_grad
    assert "loss" not in model(input_ids=torch.ones(2, 4, dtype=torch.long))


def test_the_trainer_keeps_its_own_loss_for_evaluation(tmp_path):
    eager, ours = (
        train(side, tmp_path, label_smoothing_factor=0.2, eval_strategy="steps", eval_steps=1, max_steps=1)
        for side in ("eager", "ORTTrainer")
    )
    assert type(ours.label_smoother) is LabelSmoother
    found = [[entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry] for each in (ours, eager)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_switched_off_the_loss_stays_outside(tmp_path):
    config = {"compute": {"loss_in_graph": False}}
    ours = train("ORTTrainer", tmp_path, label_smoothing_factor=0.2, config=config, max_steps=1)
    assert ort_accel.report(ours.model).features[KEY].reason == "switched off"


class OwnSmoother(LabelSmoother):
    """Smooths labels in another way."""


def test_another_way_of_smoothing_is_left_alone_and_insisting_is_an_error(tmp_path):
    for wish in ("auto", True):
        config = {"compute": {"loss_in_graph": wish}}
        ours = ORTTrainer(
            bert(),
            arguments(tmp_path, label_smoothing_factor=0.2, max_steps=1),
            train_dataset=reviews(),
            ort_config=config,
        )
        ours.label_smoother = OwnSmoother(0.2)
        if wish is True:
            with pytest.raises(OrtAccelError, match=r"loss_in_graph is true, but OwnSmoother smooths labels"):
                ours.train()
        else:
            ours.train()
            found = ort_accel.report(ours.model).features[KEY]
            assert found.state is State.REFUSED
            assert found.reason == "OwnSmoother smooths labels in its own way"


def test_the_trainer_computes_its_loss_as_the_hook_assumes():
    import inspect

    text = inspect.getsource(inspect.unwrap(Trainer.compute_loss))
    assert 'labels = inputs.pop("labels")' in text
    assert "loss = self.compute_loss_func(\n                outputs,\n                labels,\n" in text
    assert "self.label_smoother(outputs, labels, shift_labels=True, num_items_in_batch=num_items_in_batch)" in text
