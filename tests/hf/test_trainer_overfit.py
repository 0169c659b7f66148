"""300 steps on one batch take nine tenths of the loss away, and what was learnt is then generated."""

import pytest
import torch

import ort_accel
from tests.hf.tiny import bert, llama, losses, t5, train

TEXT = torch.tensor([[29, 5, 9, 4, 20, 7, 13, 28], [29, 11, 6, 17, 3, 25, 30, 8]])


def rows(labels):
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label}
        for ids, label in zip(TEXT, labels, strict=True)
    ]


def overfitted(tmp_path, build, labels, **more):
    steps = {"max_steps": 300, "per_device_train_batch_size": 2, "learning_rate": 5e-3}
    trainer = train("ORTTrainer", tmp_path, build, train_dataset=rows(labels), lr_scheduler_type="constant", **steps)
    first, *_, last = losses(trainer)
    assert last < 0.1 * first
    assert ort_accel.report(trainer.model).segments
    return trainer.model.eval()


def test_bert_learns_its_labels(tmp_path):
    model = overfitted(tmp_path, bert, torch.tensor([0, 1]))
    assert model(input_ids=TEXT).logits.argmax(-1).tolist() == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize("row", [0, 1])
def test_llama_and_t5_generate_what_they_learned(learnt, row):
    for name, model in learnt.items():
        if name == "llama":
            written = model.generate(TEXT[row : row + 1, :2], max_length=8, do_sample=False)[0]
        else:
            written = model.generate(TEXT[row : row + 1], max_length=9, do_sample=False)[0, 1:]
        assert written.tolist() == TEXT[row].tolist(), name


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overfit")
    return {
        "llama": overfitted(folder, llama, TEXT),
        "t5": overfitted(folder, t5, TEXT),
    }
