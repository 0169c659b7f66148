"""Sizes that change, and batches that are wrong."""

import gc

import psutil
import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.executor import ort_segment
from ort_accel.runtime import session
from tests.against_eager import assert_step_as_eager, compilations, pair, step


class Tagger(nn.Module):
    """Embeds tokens and classifies each; gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(31, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, ids, labels):
        logits = self.head(torch.relu(self.mix(self.embed(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(rows, length):
    return torch.randint(0, 31, (rows, length)), torch.randint(0, 5, (rows, length))


def test_after_the_second_shape_nothing_is_compiled():
    eager, ours = pair(Tagger())
    assert_step_as_eager(eager, ours, *batch(4, 16))
    assert_step_as_eager(eager, ours, *batch(4, 9))
    warm = compilations(ours)
    for rows, length in [
        (4, 5),
        (4, 17),
        (3, 8),
        (7, 7),
        (2, 33),
        (4, 64),
        (5, 3),
        (6, 6),
        (4, 12),
        (9, 2),
        (2, 2),
        (8, 40),
    ]:
        assert_step_as_eager(eager, ours, *batch(rows, length))
    assert compilations(ours) == warm


def test_sizes_that_never_change_are_compiled_once_each_if_asked():
    eager, ours = pair(Tagger(), {"version": 1, "engine": {"dynamic_shapes": False}})
    for length in (4, 6, 8):
        assert_step_as_eager(eager, ours, *batch(2, length))
    assert compilations(ours) == 6


def test_sizes_can_be_open_from_the_start():
    eager, ours = pair(Tagger(), {"version": 1, "engine": {"dynamic_shapes": True}})
    for length in (4, 6, 8):
        assert_step_as_eager(eager, ours, *batch(2, length))
    assert compilations(ours) == 2


def test_a_batch_of_one_and_an_empty_one():
    eager, ours = pair(Tagger())
    assert_step_as_eager(eager, ours, *batch(4, 6))
    assert_step_as_eager(eager, ours, *batch(1, 6))
    got, expected = step(ours, *batch(0, 6)), step(eager, *batch(0, 6))
    assert got.loss.isnan()
    assert expected.loss.isnan()


@pytest.mark.parametrize("start", [4, 7])
def test_a_slice_that_begins_at_the_end_or_beyond_it_gives_no_gradient(start):
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.mix(x)
            return hidden.square().mean() + hidden[:, start:].sum(1).square().sum()

    eager, ours = pair(Behind(), {"engine": {"fallback": "error"}})
    x = torch.randn(2, 4, 8, requires_grad=True)
    assert_step_as_eager(eager, ours, x)


def test_inputs_with_gaps_are_read_right():
    eager, ours = pair(nn.Linear(8, 4))
    wide = torch.randn(8, 6)
    assert_step_as_eager(eager, ours, wide.t())
    assert_step_as_eager(eager, ours, torch.randn(6, 16)[:, ::2])


def test_nan_goes_through_as_in_eager():
    eager, ours = pair(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Softmax(-1)))
    x = torch.randn(3, 8)
    x[1, 2] = float("nan")
    assert torch.equal(ours(x).isnan(), eager(x).isnan())


@pytest.mark.parametrize(("ids", "labels"), [(31, 0), (-1, 0), (0, 5), (0, -7)], ids=str)
def test_a_bad_index_raises_as_eager_does_and_training_goes_on(ids, labels):
    eager, ours = pair(Tagger())
    assert_step_as_eager(eager, ours, *batch(2, 6))
    bad_ids, bad_labels = batch(2, 6)
    bad_ids[0, 0], bad_labels[0, 0] = ids, labels
    with pytest.raises(IndexError) as expected:
        step(eager, bad_ids, bad_labels)
    with pytest.raises(IndexError) as got:
        step(ours, bad_ids, bad_labels)
    assert str(got.value) == str(expected.value)
    assert_step_as_eager(eager, ours, *batch(2, 6))


def test_labels_that_are_all_ignored_give_eagers_nan():
    eager, ours = pair(Tagger())
    ids, labels = batch(2, 6)
    got, expected = step(ours, ids, labels.fill_(-100)), step(eager, ids, labels)
    assert got.loss.isnan()
    assert expected.loss.isnan()


def test_an_error_of_the_model_passes_through():
    class Failing(nn.Module):
        def forward(self, x):
            if x.shape[0] > 3:
                raise ValueError("too many rows")
            return x * 2

    ours = ort_accel.accelerate(Failing())
    with pytest.raises(ValueError, match="too many rows"):
        ours(torch.ones(4))


@pytest.fixture
def broken_session(monkeypatch):
    """ONNX Runtime fails on every run; how often it was asked."""
    asked = []

    def fail(self, feeds):
        asked.append(len(feeds))
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(session.Session, "__call__", fail)
    return asked


@pytest.mark.parametrize("retry", [True, False])
def test_where_onnx_runtime_fails_pytorch_goes_on(broken_session, retry):
    eager, ours = pair(nn.Linear(8, 4), {"version": 1, "engine": {"fallback_retry": retry}})
    for _ in range(3):
        assert_step_as_eager(eager, ours, torch.ones(3, 8))
    assert len(broken_session) == (6 if retry else 2)
    assert any("out of memory, say" in item.detail for item in ort_accel.report(ours).fallbacks)


def test_where_onnx_runtime_fails_and_nothing_may_fall_back_is_an_error(broken_session):
    ours = ort_accel.accelerate(nn.Linear(8, 4), {"version": 1, "engine": {"fallback": "error"}})
    with pytest.raises(ort_accel.OrtAccelError, match="out of memory, say"):
        ours(torch.ones(3, 8))


WITHOUT_CALLS = {"version": 1, "compute": {"native": False}}
"""Let PyTorch run between sessions what sessions would call."""


class Sorting(nn.Module):
    """Holds two operators that PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).sort(-1).values.topk(2).values.sum()


def test_what_pytorch_runs_is_said_once(caplog):
    eager, ours = pair(Sorting(), WITHOUT_CALLS)
    with caplog.at_level("WARNING", "ort_accel"):
        for _ in range(3):
            assert_step_as_eager(eager, ours, torch.randn(3, 8))
    said = [record.message for record in caplog.records if "aten.topk" in record.message]
    assert len(said) == 1


class ManyKinds(nn.Module):
    """Holds operators of many kinds that PyTorch runs, on lines that are long."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        hidden_states_of_the_layer = self.linear(x).sort(-1).values.topk(4).values
        total_of_all_that_is_sorted = torch.linalg.inv(hidden_states_of_the_layer)
        total_of_all_that_is_sorted = total_of_all_that_is_sorted + hidden_states_of_the_layer.cummax(-1)[0]
        return total_of_all_that_is_sorted.kthvalue(2)[0].sum() + hidden_states_of_the_layer.mode(-1)[0].sum()


def test_a_warning_of_many_kinds_is_short_and_counts_the_rest(caplog):
    model = ort_accel.accelerate(ManyKinds(), WITHOUT_CALLS)
    model(torch.randn(4, 8)).backward()
    said = [record.getMessage() for record in caplog.records if record.name == "ort_accel"]
    assert any(" more kinds; details: print(ort_accel.report(model))" in line for line in said)
    assert max(map(len, said)) < 500
    for line in said:
        assert line.count(" (") <= 4


def test_all_of_it_is_listed_where_it_is_an_error():
    ours = ort_accel.accelerate(Sorting(), WITHOUT_CALLS | {"engine": {"fallback": "error"}})
    with pytest.raises(Exception, match=r"(?s)aten\.sort.*aten\.topk|aten\.topk.*aten\.sort"):
        ours(torch.randn(3, 8))


def test_an_operator_can_be_kept_from_onnx_runtime():
    eager, ours = pair(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()), {"version": 1, "engine": {"run_in_pytorch": ["aten.tanh"]}}
    )
    assert_step_as_eager(eager, ours, torch.randn(3, 8))
    assert [item.op for item in ort_accel.report(ours).fallbacks] == ["aten.tanh.default"]


def test_tensors_go_in_and_out_without_copies(monkeypatch):
    places = []
    convert = ort_segment.to_ort

    def watched(tensor):
        value = convert(tensor)
        places.append((tensor.data_ptr(), value.data_ptr()))
        return value

    monkeypatch.setattr(ort_segment, "to_ort", watched)
    model = ort_accel.accelerate(nn.Linear(64, 64))
    out = model(torch.randn(32, 64))
    assert places
    assert all(given == seen for given, seen in places)
    keep = out.detach()
    again = model(torch.randn(32, 64))
    assert again.data_ptr() != keep.data_ptr(), "an output that is still held must not be written again"


def test_memory_does_not_grow():
    model = ort_accel.accelerate(Tagger())
    process = psutil.Process()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def train(steps):
        for number in range(steps):
            model(*batch(2 + number % 7, 8 + number % 61)).backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return process.memory_info().rss

    before = train(150)
    after = train(300)
    assert after - before < 8 * 2**20, f"{(after - before) / 2**20:.1f} MiB in 300 steps"
