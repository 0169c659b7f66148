"""accelerate, report and restore: in place, idempotent, and invisible to everything else."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import ort_accel
from tests.against_eager import assert_step_as_eager, compilations, pair, step


class Net(nn.Module):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return self.last(self.dropout(self.norm(torch.tanh(self.first(x)))))


def tiny_bert():
    return BertForSequenceClassification(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=30)
    )


def test_the_same_model_comes_back_with_class_and_state_unchanged():
    model = Net()
    kind, keys, forward = type(model), list(model.state_dict()), model.forward
    assert ort_accel.accelerate(model) is model
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert model.forward == forward


def test_a_second_call_changes_nothing():
    model = ort_accel.accelerate(Net())
    model(torch.randn(3, 8)).sum().backward()
    before = compilations(model)
    ort_accel.accelerate(model)
    ort_accel.accelerate(model, {"version": 1})
    model(torch.randn(3, 8)).sum().backward()
    assert compilations(model) == before


def test_another_configuration_sets_the_model_up_anew():
    model = ort_accel.accelerate(Net())
    first = ort_accel.report(model)
    ort_accel.accelerate(model, {"version": 1, "compute": {"attention": "products"}})
    assert ort_accel.report(model) is not first


def test_restore_gives_plain_pytorch():
    model, x = Net().eval(), torch.randn(3, 8)
    expected = model(x)
    ort_accel.accelerate(model)
    model(x)
    assert ort_accel.restore(model) is model
    assert torch.equal(model(x), expected)
    with pytest.raises(ort_accel.OrtAccelError, match="not accelerated"):
        ort_accel.report(model)
    assert ort_accel.restore(model) is model


def test_a_switched_off_engine_leaves_the_model_alone():
    model = ort_accel.accelerate(Net(), {"version": 1, "engine": {"enabled": False}})
    with pytest.raises(ort_accel.OrtAccelError, match="not accelerated"):
        ort_accel.report(model)


def test_an_accelerated_model_can_be_copied_and_pickled():
    model = ort_accel.accelerate(Net()).eval()
    x = torch.randn(3, 8)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), expected)
        assert list(other.state_dict()) == list(model.state_dict())


def test_a_saved_model_loads_into_plain_transformers(tmp_path):
    model = ort_accel.accelerate(tiny_bert()).eval()
    ids = torch.randint(0, 30, (2, 7))
    expected = model(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        BertForSequenceClassification.from_pretrained(tmp_path).eval()(input_ids=ids).logits, expected
    )


@pytest.mark.parametrize("backend", ["by name", "as a function"])
def test_it_is_a_backend_of_torch_compile(backend):
    from ort_accel.compiler.backend import dynamo_backend

    eager = Net()
    ours = copy.deepcopy(eager)
    options = {"config": {"version": 1, "engine": {"fallback": "report"}}}
    compiled = torch.compile(ours, backend="ort_accel" if backend == "by name" else dynamo_backend, options=options)
    x = torch.randn(3, 8)
    expected, got = step(eager, x), step(compiled, x)
    torch.testing.assert_close(got.loss, expected.loss)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(got.gradients[f"_orig_mod.{name}"], gradient)


@pytest.mark.parametrize(
    "model", [nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 4), nn.ReLU())], ids=["linear", "sequence"]
)
def test_modules_of_torch_itself_run_too(model):
    eager, ours = pair(model)
    assert_step_as_eager(eager, ours, torch.randn(3, 8))
    assert compilations(ours) == 2


def test_two_models_do_not_meet():
    models = [pair(Net()) for _ in range(2)]
    for eager, ours in models:
        assert_step_as_eager(eager, ours, torch.randn(3, 8))
    assert [compilations(ours) for _, ours in models] == [2, 2]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.DataParallel(Net()), "DistributedDataParallel"),
        (lambda: torch.compile(Net()), "wrapped by torch.compile"),
        (lambda: "a model", "takes a torch.nn.Module"),
        (lambda: Net().to("meta"), None),
    ],
    ids=["data parallel", "compiled", "no module", "not yet loaded"],
)
def test_what_cannot_be_accelerated_is_said(model, message):
    if message is None:
        ort_accel.accelerate(model())
        return
    with pytest.raises(ort_accel.OrtAccelError, match=message):
        ort_accel.accelerate(model())


def test_a_wrong_configuration_leaves_the_model_alone():
    model = Net()
    with pytest.raises(ort_accel.ConfigError, match=r"did you mean memory\.level"):
        ort_accel.accelerate(model, {"version": 1, "memory": {"lvel": 1}})
    assert model._compiled_call_impl is None


@pytest.mark.long
def test_a_search_may_build_any_number_of_models():
    x = torch.randn(2, 4)
    for number in range(80):
        model = ort_accel.accelerate(nn.Sequential(nn.Linear(4, 2 + number % 3)))
        with torch.no_grad():
            model(x)
        assert compilations(model) == 1, f"model {number} ran in eager mode"
