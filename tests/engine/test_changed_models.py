"""A model that is changed between two steps runs as it then is from the next step on, as in eager mode."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from ort_accel.capture import dynamo
from ort_accel.config import load_config
from ort_accel.engine import accelerate_layers
from ort_accel.reporting.fallbacks import Reason
from tests.against_eager import pair, report
from tests.engine.changes import (
    Block,
    Change,
    Net,
    assert_as_eager,
    assert_followed,
    data_of,
    done_and_undone,
    doubling,
    entry_of,
    first,
    forward_of,
    pair_of_nets,
    twice,
)
from tests.tiers import mostly_long


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class QuantizedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", (linear.weight.detach() * 16).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return F.linear(x, self.weight.float() / 16, self.bias)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


def block_at(place: int, make: Callable[[Net], nn.Module]) -> Change:
    def change(model: Net) -> AbstractContextManager:
        before = model.blocks[place]
        after = make(model)
        return done_and_undone(
            lambda: model.blocks.__setitem__(place, after), lambda: model.blocks.__setitem__(place, before)
        )

    return change


def parametrized(register: Callable[[nn.Module], object]) -> Change:
    def change(model: Net) -> AbstractContextManager:
        linear = first(model).linear
        return done_and_undone(
            lambda: (torch.manual_seed(7), register(linear)),
            lambda: parametrize.remove_parametrizations(linear, "weight"),
        )

    return change


def thawed(parameter: nn.Parameter) -> AbstractContextManager:
    return done_and_undone(lambda: parameter.requires_grad_(False), lambda: parameter.requires_grad_(True))


OF_A_MODEL: dict[str, Change] = {
    "forward_replaced": lambda m: forward_of(first(m)),
    "forward_of_a_leaf_replaced": lambda m: forward_of(first(m).linear),
    "forward_of_the_model_replaced": lambda m: forward_of(
        m, lambda forward: lambda ids, labels: (forward(ids, labels)[0] * 2, None)
    ),
    "a_bound_method": lambda m: patch.object(
        first(m), "forward", types.MethodType(lambda self, x: Block.forward(self, x) * 2, first(m))
    ),
    "checkpointed": lambda m: forward_of(
        first(m), lambda forward: lambda x: checkpoint(forward, x * 2, use_reentrant=False)
    ),
    "a_method_of_a_block": lambda m: patch.object(first(m), "mixed", lambda x: x * 2),
    "an_attribute": lambda m: patch.object(first(m), "offset", 2.0),
    "rate_of_dropout": lambda m: patch.object(first(m).dropout, "p", 0.7),
    "epsilon_of_a_norm": lambda m: patch.object(first(m).norm, "eps", 0.5),
    "kind_of_gelu": lambda m: patch.object(first(m).act, "approximate", "tanh"),
    "attribute_of_settings": lambda m: patch.object(m.settings, "power", 2.0),
    "text_of_settings": lambda m: patch.object(m.settings, "activation", "relu"),
    "entry_of_settings": lambda m: entry_of(m.settings.entries, "scale", 2.0),
    "new_entry_of_settings": lambda m: entry_of(m.settings.entries, "absent", 2.0),
    "item_of_a_list": lambda m: done_and_undone(
        lambda: m.settings.entries["list"].__setitem__(0, 2.0), lambda: m.settings.entries["list"].__setitem__(0, 1.0)
    ),
    "method_of_settings": lambda m: patch.object(m.settings, "scaled", lambda x: x * 2),
    "another_buffer": lambda m: patch.object(first(m), "shift", torch.arange(6.0)),
    "data_of_a_buffer": lambda m: data_of(first(m).shift, torch.arange(6.0)),
    "another_parameter": lambda m: patch.object(first(m).linear, "weight", nn.Parameter(torch.eye(6))),
    "data_of_a_parameter": lambda m: data_of(first(m).linear.weight, torch.eye(6)),
    "strides_of_a_parameter": lambda m: data_of(first(m).linear.weight, torch.arange(36.0).view(6, 6).div(36).t()),
    "no_bias": lambda m: patch.object(first(m).linear, "bias", None),
    "a_shared_parameter": lambda m: patch.object(m.blocks[1].linear, "weight", first(m).linear.weight),
    "a_shared_block": block_at(1, first),
    "untied": lambda m: patch.object(m.head, "weight", nn.Parameter(m.head.weight.detach() * 2)),
    "another_block": block_at(0, lambda _: seeded(Block)),
    "another_leaf": lambda m: patch.object(first(m), "linear", seeded(lambda: nn.Linear(6, 6))),
    "a_leaf_of_another_class": lambda m: patch.object(first(m), "linear", seeded(lambda: DoubledLinear(6, 6))),
    "class_of_a_leaf": lambda m: done_and_undone(
        lambda: setattr(first(m).linear, "__class__", DoubledLinear),
        lambda: setattr(first(m).linear, "__class__", nn.Linear),
    ),
    "another_activation": lambda m: patch.object(first(m), "act", nn.ReLU()),
    "quantized": lambda m: patch.object(first(m), "linear", QuantizedLinear(first(m).linear)),
    "one_more_block": lambda m: done_and_undone(
        lambda: m.blocks.append(seeded(Block)), lambda: m.blocks.__delitem__(len(m.blocks) - 1)
    ),
    "parametrized": parametrized(lambda linear: parametrize.register_parametrization(linear, "weight", Doubled())),
    "weight_norm": parametrized(lambda linear: parametrizations.weight_norm(linear, dim=None)),
    "spectral_norm": parametrized(parametrizations.spectral_norm),
    "pruned": lambda m: done_and_undone(
        lambda: prune.l1_unstructured(first(m).linear, "weight", 0.5), lambda: prune.remove(first(m).linear, "weight")
    ),
    "frozen": lambda m: thawed(first(m).linear.weight),
    "evaluated": lambda m: done_and_undone(first(m).eval, first(m).train),
    "dropout_evaluated": lambda m: done_and_undone(first(m).dropout.eval, first(m).dropout.train),
}


SHORT_OF_A_MODEL = (
    "forward_replaced",
    "forward_of_the_model_replaced",
    "checkpointed",
    "a_method_of_a_block",
    "an_attribute",
    "rate_of_dropout",
    "attribute_of_settings",
    "new_entry_of_settings",
    "item_of_a_list",
    "data_of_a_buffer",
    "another_parameter",
    "strides_of_a_parameter",
    "no_bias",
    "a_shared_parameter",
    "untied",
    "another_block",
    "a_leaf_of_another_class",
    "one_more_block",
    "parametrized",
    "spectral_norm",
    "frozen",
    "evaluated",
)
"""Changes that `make test` makes: one of each mechanism by which the engine notices them."""


@pytest.fixture(scope="module")
def models() -> tuple[Net, Net]:
    return pair_of_nets()


@pytest.mark.parametrize("kind", mostly_long(OF_A_MODEL, *SHORT_OF_A_MODEL))
def test_a_change_of_the_model(kind, models):
    assert_followed(models, OF_A_MODEL[kind], of_the_process=False)


def test_more_changes_than_dynamo_compiles_for(monkeypatch):
    """Beyond the limit a model runs in eager mode, with the hooks that it then has, and the report says so."""
    monkeypatch.setattr(dynamo, "RECOMPILE_LIMIT", 3)
    eager, ours = pair(Net())
    for factor in range(1, 7):
        with ExitStack() as stack:
            for model in (eager, ours):
                stack.enter_context(forward_of(first(model), lambda forward, by=factor: lambda x: forward(x) * by))
                stack.enter_context(first(model).register_forward_hook(twice))
            assert_as_eager(eager, ours)
    assert_as_eager(eager, ours)
    assert Reason.GRAPH_BREAK in {item.reason for item in report(ours).fallbacks}


def test_a_layer_that_runs_by_itself():
    eager, ours = pair(Net())
    accelerate_layers(ours, load_config(None), list(ours.blocks))
    assert_as_eager(eager, ours)
    with patch.object(Block, "forward", doubling(Block.forward)):
        assert_as_eager(eager, ours)
    with first(eager).linear.register_forward_hook(twice), first(ours).linear.register_forward_hook(twice):
        assert_as_eager(eager, ours)
    assert_as_eager(eager, ours)
