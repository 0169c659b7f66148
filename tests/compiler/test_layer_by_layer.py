"""Models that are captured layer by layer, each layer with its own code around it."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import ort_accel
from ort_accel import engine
from ort_accel.compiler.layer_by_layer import layers_of
from ort_accel.config import load_config
from ort_accel.reporting.report import State

CONFIG = load_config({"observe": {"log_level": "error"}})


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, num_hidden_layers=3, **sizes))


def names_of(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[layer] for layer in layers_of(model)]


def by_layers(model, **more):
    return engine.accelerate_layers(model, CONFIG, layers_of(model), **more)


def step(model, ids):
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return [output.loss.detach(), output.logits.detach(), *(parameter.grad for parameter in model.parameters())]


def test_layers_are_repeated_modules_and_others_with_weights():
    assert names_of(llama()) == ["model.layers.0", "model.layers.1", "model.layers.2", "lm_head"]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    bert = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))
    assert names_of(bert) == ["bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "classifier"]


def test_a_layer_that_is_used_twice_counts_once():
    layer = nn.Linear(2, 2)
    assert layers_of(nn.Sequential(nn.ModuleList([layer, layer]), nn.Embedding(2, 2), nn.LayerNorm(2))) == [layer]


def test_layers_of_a_class_share_graphs_and_equal_eager_mode():
    ids = torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(1))
    eager, model = llama(), by_layers(llama())
    for _ in range(2):
        for expected, found in zip(step(eager, ids), step(model, ids), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    report = ort_accel.report(model)
    assert report.counters["compilations"] == 4
    reasons = {name: report.features[name].reason for name in ("density.labels", "density.padding", "compute.upstream")}
    assert "no batch has been seen yet" not in reasons.values()
    assert "layers run one by one" in report.features["compute.loss_only"].reason


class Balanced(nn.Module):
    """A layer that also gives a loss of its own, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = x + self.linear(x).tanh()
        return x, x.square().mean()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Balanced() for _ in range(3))

    def forward(self, x):
        total = x.new_zeros(())
        for layer in self.layers:
            x, own = layer(x)
            total = total + own
        return total + x.sum()


def test_outputs_of_a_layer_beside_its_loss_are_computed():
    torch.manual_seed(0)
    eager = Stack()
    model, x = by_layers(copy.deepcopy(eager)), torch.randn(2, 3, 4)
    for each in (eager, model):
        each(x).backward()
    for expected, found in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    assert ort_accel.report(model).features["compute.loss_only"].state is State.OFF


def test_hooks_of_a_layer_see_values_around_its_graph():
    model, seen = by_layers(llama()), []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].sum().item()))
    step(model, torch.ones(1, 4, dtype=torch.long))
    assert len(seen) == 1
    assert "a graph break" not in {fallback.op for fallback in ort_accel.report(model).fallbacks}


def test_a_kv_cache_that_the_script_reads_is_filled():
    model = by_layers(llama()).eval()
    with torch.no_grad():
        filled = model(torch.ones(1, 4, dtype=torch.long), use_cache=True).past_key_values
        eager = engine.restore(model)(torch.ones(1, 4, dtype=torch.long), use_cache=True).past_key_values
    assert filled.get_seq_length() == eager.get_seq_length() == 4


def test_restoring_leaves_nothing_behind():
    undone = []
    model = engine.restore(by_layers(llama(), undo=lambda: undone.append(True)))
    assert undone == [True]
    assert all(module._compiled_call_impl is None and "forward" not in vars(module) for module in model.modules())


def test_another_configuration_replaces_the_layers():
    model = by_layers(llama())
    assert engine.runs_by_layers(model)
    ort_accel.accelerate(model, {"observe": {"log_level": "info"}})
    assert not engine.runs_by_layers(model)
    assert model.lm_head._compiled_call_impl is None


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_plain_models(again):
    copied = again(by_layers(llama()))
    ids = torch.ones(1, 3, dtype=torch.long)
    torch.testing.assert_close(copied(ids).logits, llama()(ids).logits)
    assert copied.lm_head._compiled_call_impl is None
