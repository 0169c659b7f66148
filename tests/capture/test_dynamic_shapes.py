"""Which sizes are kept open, and what a graph need not be compiled a second time for."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

import ort_accel
from ort_accel.capture.dynamic_shapes import DynamicDims, ForeseenSizes
from ort_accel.engine import foresee
from tests.against_eager import assert_step_as_eager, compilations, pair


@pytest.fixture
def marked(monkeypatch):
    """The dimensions that were last marked, for each input in turn."""
    found = []
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda _, dims: found.append(list(dims)))

    def take():
        last = found.copy()
        found.clear()
        return last

    return take


def inputs(batch=2, source=8, target=4):
    return [
        torch.zeros(batch, source, dtype=torch.long),
        torch.zeros(batch, target, dtype=torch.long),
        torch.zeros(batch, source, 16),
        torch.zeros(batch),
    ]


def test_first_sizes_are_fixed_and_a_smaller_batch_opens_only_the_batch(marked):
    sizes = DynamicDims(ForeseenSizes())
    sizes.mark(inputs())
    assert marked() == []
    sizes.mark(inputs(batch=1))
    assert marked() == [[0], [0], [0], [0]]


def test_a_length_that_changes_opens_the_other_lengths(marked):
    sizes = DynamicDims(ForeseenSizes())
    sizes.mark(inputs())
    sizes.mark(inputs(source=9))
    assert marked() == [[0, 1], [0, 1], [0, 1], [0]]


def test_what_is_foreseen_is_open_at_once(marked):
    DynamicDims(ForeseenSizes(lengths=True)).mark(inputs())
    assert marked() == [[0, 1], [0, 1], [0, 1], [0]]
    DynamicDims(ForeseenSizes(batch=True)).mark(inputs())
    assert marked() == [[0], [0], [0], [0]]


def test_pictures_keep_their_size(marked):
    sizes = DynamicDims(ForeseenSizes())
    sizes.mark([torch.zeros(2, 3, 8, 8)])
    sizes.mark([torch.zeros(1, 3, 8, 8)])
    assert marked() == [[0]]


def text(batch, length, **more):
    ids = torch.randint(3, 40, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


class Translates(torch.nn.Module):
    """Reads two texts of different lengths."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(40, 8)

    def forward(self, input_ids, labels):
        weights = (self.words(labels) @ self.words(input_ids).mT).softmax(-1)
        return torch.nn.functional.mse_loss(weights @ self.words(input_ids), self.words(labels))


def test_source_and_target_lengths_that_change_one_after_the_other_compile_twice():
    eager, ours = pair(Translates())
    for source, target in [(8, 4), (9, 4), (9, 5), (7, 6)]:
        ids, labels = torch.randint(40, (2, source)), torch.randint(40, (2, target))
        assert_step_as_eager(eager, ours, input_ids=ids, labels=labels)
    assert compilations(ours) == 4, "forward and backward, for the first sizes and for all"


def classifier(**config):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=40, **small, **config))


def test_foreseen_lengths_compile_once():
    eager, ours = pair(classifier())
    foresee(ours, ForeseenSizes(lengths=True))
    for batch, length in [(3, 8), (3, 5), (2, 9)]:
        assert_step_as_eager(eager, ours, **text(batch, length, labels=torch.zeros(batch, dtype=torch.long)))
    assert compilations(ours) == 2


@pytest.mark.parametrize(
    ("num_labels", "labels", "kind"),
    [
        (1, torch.rand(2), "regression"),
        (3, torch.tensor([0, 2]), "single_label_classification"),
        (3, torch.rand(2, 3), "multi_label_classification"),
    ],
)
def test_a_classifier_that_finds_out_what_its_labels_are_compiles_once(num_labels, labels, kind):
    eager, ours = pair(classifier(num_labels=num_labels))
    for _ in range(2):
        assert_step_as_eager(eager, ours, **text(2, 6, labels=labels))
    assert eager.config.problem_type == ours.config.problem_type == kind
    assert compilations(ours) == 2


def test_a_classifier_of_pictures_does_so_too():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    eager, ours = pair(ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)))
    for _ in range(2):
        assert_step_as_eager(eager, ours, pixel_values=torch.randn(2, 3, 8, 8), labels=torch.tensor([0, 2]))
    assert eager.config.problem_type == ours.config.problem_type == "single_label_classification"
    assert compilations(ours) == 2


def test_a_problem_type_that_a_model_would_not_write_is_not_written():
    class ReadsIt(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.weight = BertConfig(num_labels=3), torch.nn.Linear(4, 3)

        def forward(self, x, labels):
            loss = torch.nn.functional.cross_entropy(self.weight(x), labels)
            return loss if self.config.problem_type is None else -loss

    model = ort_accel.accelerate(ReadsIt())
    model(torch.rand(2, 4), labels=torch.tensor([0, 2])).backward()
    assert model.config.problem_type is None
