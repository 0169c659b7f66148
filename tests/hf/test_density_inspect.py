"""`density.inspect` in a Trainer: figures beside the loss, the table in the report, labels that no model gets."""

import json

import pytest
import torch

import ort_accel
from tests.hf.tiny import llama, logged, reviews, texts, train

OFF = {"enabled": False}


def config(**more):
    return {"density": {"inspect": True, "inspect_every": 2}, "observe": {"log_level": "error"}, **more}


@pytest.mark.parametrize("engine", [{}, OFF], ids=["engine", "eager"])
def test_each_line_of_the_log_has_the_share_of_labels_and_of_flops_that_count(tmp_path, engine):
    data = texts()[1::2]
    trainer = train("callback", tmp_path, llama, max_steps=3, train_dataset=data, config=config(engine=engine))
    for entry in logged(trainer):
        assert entry["ort/label_density"] == entry["ort/density"] == 0.5
        assert 0.3 < entry["ort/flops_needed"] <= 0.5


def test_a_batch_is_counted_once_by_trainer_and_model(tmp_path):
    trainer = train("ORTTrainer", tmp_path, max_steps=2, gradient_accumulation_steps=2, config=config())
    found = ort_accel.report(trainer.model).inspection
    assert found.batches == 4
    assert [row.step for row in found.rows] == [3, 4]


def test_labels_that_the_trainer_keeps_from_the_model_are_seen(tmp_path):
    file = tmp_path / "report.json"

    def loss(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    settings = config(engine=OFF, observe={"log_level": "error", "report_file": str(file)})
    train("callback", tmp_path, llama, max_steps=2, train_dataset=texts(), compute_loss_func=loss, config=settings)
    kinds = {row["kind"] for row in json.loads(file.read_text())["inspection"]["rows"]}
    assert kinds == {"EMBED", "LABEL"}


def test_without_density_inspect_no_batch_is_inspected(tmp_path):
    trainer = train("callback", tmp_path, max_steps=1, train_dataset=reviews(), config={"engine": {}})
    assert ort_accel.report(trainer.model).inspection is None
    assert "ort/flops_needed" not in logged(trainer)[0]
