"""Whatever is changed between two steps takes effect from the next step on, and so does its end, as in eager mode."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from ort_accel.capture import dynamo
from ort_accel.config import load_config
from ort_accel.engine import accelerate_layers
from ort_accel.reporting import Reason, State
from tests.against_eager import ATOL, RTOL, Trace, assert_same, compilations, pair, report, step
from tests.tiers import mostly_long

HERE = sys.modules[__name__]
SWITCH = "ORT_ACCEL_TESTS_SWITCH"

FACTOR = 1.0
REGISTRY = {"scale": lambda x: x}


def helper(x, power=1.0, *, shift=0.0):
    return x * FACTOR * power + shift


def made(factor):
    def scale(x):
        return x * factor

    return scale


class Settings:
    """What a model reads while it runs: attributes, entries, methods."""

    def __init__(self) -> None:
        self.power, self.activation, self.entries = 1.0, "gelu", {"scale": 1.0, "list": [1.0, 2.0]}

    def scaled(self, x):
        return x


class Part(nn.Module):
    """What a block inherits."""

    slope = 1.0

    def mixed(self, x):
        return x * self.slope + self.offset


class Block(Part):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act, self.dropout = nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.3)
        self.register_buffer("shift", torch.zeros(6))
        self.offset = 0.0

    @staticmethod
    def doubled(x):
        return x + x

    @property
    def gain(self):
        return 1.0

    def forward(self, x):
        return self.norm(self.mixed(self.dropout(self.act(self.linear(x)))) + self.shift) * self.gain + self.doubled(x)


class Net(nn.Module):
    """A small language model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.embed, self.blocks, self.head = nn.Embedding(9, 6), nn.ModuleList([Block(), Block()]), nn.Linear(6, 9)
        self.head.weight = self.embed.weight

    def entry(self, name):
        try:
            return self.settings.entries[name]
        except KeyError:
            return 1.0

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = F.gelu(x) if self.settings.activation == "gelu" else torch.relu(x)
        x = REGISTRY["scale"](helper(x)) * self.settings.power * self.entry("scale") * self.entry("absent")
        x = self.settings.scaled(x).atan() * self.settings.entries["list"][0]
        if os.environ.get(SWITCH):
            x = x * 3
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


Change = Callable[[Net], AbstractContextManager]
"""Changes a model, or the process that it runs in, as long as it is entered."""


def first(model: Net) -> Block:
    return model.blocks[0]


def twice(*args):
    """A hook of any kind: doubles what comes last, an input, an output, or gradients."""
    last = args[-1]
    return tuple(None if each is None else each * 2 for each in last) if isinstance(last, tuple) else last * 2


def twice_gradient_of_input(module, of_input, of_output):
    return twice(of_input)


def doubled_output(module, args, output):
    output.register_hook(twice)


@contextmanager
def done_and_undone(do: Callable[[], object], undo: Callable[[], object]) -> Iterator[None]:
    do()
    try:
        yield
    finally:
        undo()


def entry_of(mapping, key, value):
    return patch.dict(mapping, {key: value})


def both(*changes: Change) -> Change:
    @contextmanager
    def change(model: Net) -> Iterator[None]:
        with ExitStack() as stack:
            for each in changes:
                stack.enter_context(each(model))
            yield

    return change


def hook_of_parameter(parameter):
    parameter.grad = parameter.grad * 2


HOOKS: dict[str, Change] = {
    "forward_pre": lambda m: first(m).register_forward_pre_hook(twice),
    "forward_pre_zero": lambda m: first(m).register_forward_pre_hook(lambda module, args: (args[0] * 0,)),
    "forward": lambda m: first(m).register_forward_hook(twice),
    "forward_kwargs": lambda m: m.register_forward_hook(lambda *args: (args[-1][0] * 2, args[-1][1]), with_kwargs=True),
    "forward_pre_kwargs": lambda m: first(m).register_forward_pre_hook(
        lambda module, args, kwargs: (twice(args), kwargs), with_kwargs=True
    ),
    "always_call": lambda m: first(m).register_forward_hook(twice, always_call=True),
    "of_a_leaf": lambda m: first(m).linear.register_forward_hook(twice),
    "of_the_embedding": lambda m: m.embed.register_forward_hook(twice),
    "of_the_head": lambda m: m.head.register_forward_hook(twice),
    "two_in_order": both(
        lambda m: first(m).register_forward_hook(twice),
        lambda m: first(m).register_forward_hook(lambda module, args, output: output + 1, prepend=True),
    ),
    "in_place": lambda m: first(m).register_forward_hook(lambda module, args, output: output.mul_(2)),
    "on_an_output's_gradient": lambda m: first(m).register_forward_hook(doubled_output),
    "backward": lambda m: first(m).register_full_backward_hook(twice_gradient_of_input),
    "backward_pre": lambda m: first(m).register_full_backward_pre_hook(twice),
    "of_a_parameter": lambda m: first(m).linear.weight.register_hook(twice),
    "of_a_tied_parameter": lambda m: m.head.weight.register_hook(twice),
    "after_accumulation": lambda m: first(m).linear.weight.register_post_accumulate_grad_hook(hook_of_parameter),
    "another_dict_of_hooks": lambda m: patch.object(first(m), "_forward_hooks", OrderedDict({12345: twice})),
}

HOOKS_ON_ALL_MODULES: dict[str, Change] = {
    "forward": lambda _: module_hooks.register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, Block) else None
    ),
    "forward_pre": lambda _: module_hooks.register_module_forward_pre_hook(
        lambda module, args: twice(args) if isinstance(module, Block) else None
    ),
    "backward": lambda _: module_hooks.register_module_full_backward_hook(
        lambda module, of_input, of_output: twice(of_input) if isinstance(module, Block) else None
    ),
    "backward_pre": lambda _: module_hooks.register_module_full_backward_pre_hook(
        lambda module, of_output: twice(of_output) if isinstance(module, Block) else None
    ),
}


def forward_of(module: nn.Module, wrap: Callable[..., object] = lambda forward: lambda x: forward(x) * 2) -> Change:
    return patch.object(module, "forward", wrap(module.forward))


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


def data_of(tensor: torch.Tensor, value: torch.Tensor) -> AbstractContextManager:
    before = tensor.data
    return done_and_undone(lambda: setattr(tensor, "data", value), lambda: setattr(tensor, "data", before))


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


def doubling(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


class DoublesGelu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.gelu else result


class DoublesTanh(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.gelu.default else result


def code_of(function, other) -> AbstractContextManager:
    before = function.__code__
    return done_and_undone(
        lambda: setattr(function, "__code__", other.__code__), lambda: setattr(function, "__code__", before)
    )


def doubled_call(module, *args, **kwargs):
    result = _CALL(module, *args, **kwargs)
    return result * 2 if isinstance(module, Block) else result


_CALL = nn.Module.__call__

OF_THE_PROCESS: dict[str, Change] = {
    "forward_of_a_class": lambda _: patch.object(Block, "forward", doubling(Block.forward)),
    "forward_of_torch's_class": lambda _: patch.object(nn.Linear, "forward", doubling(nn.Linear.forward)),
    "call_of_a_class": lambda _: patch.object(Block, "__call__", doubled_call),
    "call_of_all_modules": lambda _: patch.object(nn.Module, "__call__", doubled_call),
    "an_inherited_method": lambda _: patch.object(Part, "mixed", lambda self, x: x * 2),
    "a_method_that_hides_another": lambda _: patch.object(Block, "mixed", lambda self, x: x * 2, create=True),
    "code_of_a_method": lambda _: code_of(Part.mixed, lambda self, x: x * 2),
    "a_property": lambda _: patch.object(Block, "gain", property(lambda self: 2.0)),
    "a_static_method": lambda _: patch.object(Block, "doubled", staticmethod(lambda x: x * 3)),
    "attribute_of_a_class": lambda _: patch.object(Part, "slope", 2.0),
    "method_of_another_class": lambda _: patch.object(Settings, "scaled", lambda self, x: x * 2),
    "method_of_the_model's_class": lambda _: patch.object(Net, "entry", lambda self, name: 2.0),
    "gelu": lambda _: patch.object(F, "gelu", doubling(F.gelu)),
    "linear": lambda _: patch.object(F, "linear", doubling(F.linear)),
    "layer_norm": lambda _: patch.object(F, "layer_norm", doubling(F.layer_norm)),
    "cross_entropy": lambda _: patch.object(F, "cross_entropy", doubling(F.cross_entropy)),
    "a_method_of_tensors": lambda _: patch.object(torch.Tensor, "atan", doubling(torch.Tensor.atan)),
    "a_function": lambda _: patch.object(HERE, "helper", lambda x: x * 2),
    "code_of_a_function": lambda _: code_of(helper, lambda x, power=1.0, *, shift=0.0: x * 2),
    "defaults_of_a_function": lambda _: patch.object(helper, "__defaults__", (2.0,)),
    "a_constant": lambda _: patch.object(HERE, "FACTOR", 2.0),
    "a_registered_function": lambda _: entry_of(REGISTRY, "scale", made(2.0)),
    "a_partial_function": lambda _: entry_of(REGISTRY, "scale", functools.partial(torch.mul, 2.0)),
    "environment": lambda _: patch.dict(os.environ, {SWITCH: "1"}),
    "a_function_mode": lambda _: DoublesGelu(),
    "a_dispatch_mode": lambda _: DoublesTanh(),
}


def setting(put: Callable[[object], object], value: object, before: object) -> Change:
    return lambda _: done_and_undone(lambda: put(value), lambda: put(before))


WITHOUT_EFFECT_HERE: dict[str, Change] = {
    "default_dtype": setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default_device": setting(torch.set_default_device, "cpu", None),
    "deterministic": setting(torch.use_deterministic_algorithms, True, False),
    "precision_of_products": setting(torch.set_float32_matmul_precision, "high", "highest"),
    "anomaly_detection": setting(torch.autograd.set_detect_anomaly, True, False),
    "flushed_denormals": setting(torch.set_flush_denormal, True, False),
    "kinds_of_attention": setting(torch.backends.cuda.enable_flash_sdp, False, True),
    "saved_on_cpu": lambda _: torch.autograd.graph.save_on_cpu(),
}
"""Settings of PyTorch that this model's numbers do not depend on, but what is compiled may."""


BATCH = tuple(torch.randint(0, 9, (2, 2, 5), generator=torch.Generator().manual_seed(1)))


def taken(model: nn.Module) -> Trace:
    """A step, always with the same batch."""
    return step(model, *BATCH, loss=lambda outputs: outputs[0])


def differ(one: Trace, other: Trace) -> bool:
    if not torch.allclose(one.loss, other.loss) or one.gradients.keys() != other.gradients.keys():
        return True
    pairs = [(gradient, other.gradients[name]) for name, gradient in one.gradients.items()]
    return any((a is None) != (b is None) or (a is not None and not torch.allclose(a, b)) for a, b in pairs)


def assert_as_eager(eager: Net, ours: Net) -> Trace:
    expected = taken(eager)
    assert_same(taken(ours), expected)
    return expected


@pytest.fixture(scope="module")
def models() -> Callable[[str], tuple[Net, Net]]:
    """For each family of changes a model in eager mode and one on the engine, which go through all of them."""

    @functools.cache
    def for_family(family: str) -> tuple[Net, Net]:
        torch.manual_seed(0)
        return pair(Net())

    return for_family


def assert_followed(models: tuple[Net, Net], change: Change, of_the_process: bool, has_effect: bool = True) -> None:
    eager, ours = models
    before = assert_as_eager(eager, ours)
    with ExitStack() as stack:
        for model in (eager,) if of_the_process else (eager, ours):
            stack.enter_context(change(model))
        after = assert_as_eager(eager, ours)
        compiled = compilations(ours)
        assert_as_eager(eager, ours)
        assert compilations(ours) == compiled, "the second step with a change compiles nothing"
    assert_as_eager(eager, ours)
    assert differ(before, after) == has_effect, "this change does not show what it is to show"


SHORT_HOOKS = (
    "forward_pre",
    "forward_kwargs",
    "two_in_order",
    "in_place",
    "on_an_output's_gradient",
    "backward",
    "of_a_parameter",
    "after_accumulation",
    "another_dict_of_hooks",
)
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
SHORT_OF_THE_PROCESS = (
    "forward_of_a_class",
    "forward_of_torch's_class",
    "call_of_all_modules",
    "an_inherited_method",
    "code_of_a_method",
    "a_property",
    "attribute_of_a_class",
    "method_of_another_class",
    "gelu",
    "a_method_of_tensors",
    "a_function",
    "defaults_of_a_function",
    "a_constant",
    "a_registered_function",
    "environment",
    "a_function_mode",
    "a_dispatch_mode",
)
"""Changes that `make test` makes: one of each mechanism by which the engine notices them."""


@pytest.mark.parametrize("kind", mostly_long(HOOKS, *SHORT_HOOKS))
def test_hooks(kind, models):
    assert_followed(models("hooks"), HOOKS[kind], of_the_process=False)


@pytest.mark.parametrize("kind", mostly_long(HOOKS_ON_ALL_MODULES, "forward", "backward"))
def test_hooks_on_all_modules(kind, models):
    assert_followed(models("hooks"), HOOKS_ON_ALL_MODULES[kind], of_the_process=True)


@pytest.mark.parametrize("kind", mostly_long(OF_A_MODEL, *SHORT_OF_A_MODEL))
def test_a_change_of_the_model(kind, models):
    assert_followed(models("model"), OF_A_MODEL[kind], of_the_process=False)


@pytest.mark.parametrize("kind", mostly_long(OF_THE_PROCESS, *SHORT_OF_THE_PROCESS))
def test_a_change_around_the_model(kind, models):
    assert_followed(models("process"), OF_THE_PROCESS[kind], of_the_process=True)


@pytest.mark.parametrize(
    "kind", mostly_long(WITHOUT_EFFECT_HERE, "default_dtype", "deterministic", "anomaly_detection", "saved_on_cpu")
)
def test_a_setting_of_pytorch(kind, models):
    assert_followed(models("process"), WITHOUT_EFFECT_HERE[kind], of_the_process=True, has_effect=False)


def test_hooks_see_what_eager_modes_see():
    """A hook is called as often, with the same values."""
    seen: dict[bool, list[torch.Tensor]] = {}
    eager, ours = pair(Net())
    assert_as_eager(eager, ours)
    for model in (eager, ours):
        kept = seen.setdefault(model is ours, [])
        with model.blocks[1].register_forward_hook(
            lambda module, args, output, kept=kept: kept.append(output.detach())
        ):
            taken(model)
            taken(model)
        taken(model)
    assert len(seen[False]) == 2
    torch.testing.assert_close(seen[True], seen[False], rtol=RTOL, atol=ATOL)


def test_an_error_in_a_hook_is_raised():
    eager, ours = pair(Net())
    assert_as_eager(eager, ours)

    def refuse(module, args, output):
        raise ValueError("no further")

    with first(ours).register_forward_hook(refuse), pytest.raises(ValueError, match="no further"):
        taken(ours)
    assert_as_eager(eager, ours)


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


def test_sessions_follow_pytorch(monkeypatch):
    """Sessions of what is compiled later run as PyTorch is set then."""
    eager, ours = pair(Net())
    assert_as_eager(eager, ours)
    assert report(ours).features["engine.deterministic"].state is State.OFF
    with setting(torch.use_deterministic_algorithms, True, False)(ours):
        assert_as_eager(eager, ours)
        assert report(ours).features["engine.deterministic"].state is State.APPLIED
    with setting(torch.set_num_threads, 1, torch.get_num_threads())(ours):
        assert_as_eager(eager, ours)
        assert " 1 threads" in report(ours).features["engine"].effect


def test_tangents_of_forward_mode():
    """Forward-mode differentiation, which compiled graphs know nothing of."""
    eager, ours = pair(Net())
    assert_as_eager(eager, ours)
    found = []
    for model in (eager, ours):
        model.eval()
        with forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(value.detach(), value.detach()) for name, value in model.named_parameters()
            }
            found.append(forward_ad.unpack_dual(functional_call(model, duals, BATCH)[0]))
    assert found[0].tangent is not None
    torch.testing.assert_close(tuple(found[1]), tuple(found[0]))


def test_a_layer_that_runs_by_itself():
    eager, ours = pair(Net())
    accelerate_layers(ours, load_config(None), list(ours.blocks))
    assert_as_eager(eager, ours)
    with patch.object(Block, "forward", doubling(Block.forward)):
        assert_as_eager(eager, ours)
    with first(eager).linear.register_forward_hook(twice), first(ours).linear.register_forward_hook(twice):
        assert_as_eager(eager, ours)
    assert_as_eager(eager, ours)


def padded(rows: int = 3, length: int = 8) -> dict[str, torch.Tensor]:
    """A batch of which less than half is tokens."""
    mask = (torch.arange(length) < torch.arange(1, rows + 1)[:, None] * 2 - 1).long()
    ids = torch.arange(rows * length).view(rows, length) % 30
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}

TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "bert": (lambda: BertForMaskedLM(BertConfig(**SIZES)), lambda model: model.bert.encoder.layer[0]),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), lambda model: model.model.layers[0]),
}


@contextmanager
def attention_written_out(model: nn.Module) -> Iterator[None]:
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation("sdpa")


@contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    yield
    model.gradient_checkpointing_disable()


@contextmanager
def under_autocast() -> Iterator[None]:
    torch.set_autocast_enabled("cpu", True)
    yield
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.long
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_a_model_of_transformers_whose_rows_are_skipped(family):
    """What is prepared for a batch or kept of weights is not that of the model as it was before a change."""
    make, layer = TRANSFORMERS[family]
    torch.manual_seed(0)
    eager, ours = pair(make())
    name = next(iter(layer(eager).state_dict()))
    weight = layer(eager).get_parameter(name).detach() * 2

    def zeroed(module, args):
        return args[0] * 0, *args[1:]

    changes: list[Change] = [
        lambda model: layer(model).register_forward_pre_hook(zeroed),
        lambda model: layer(model).register_full_backward_hook(
            lambda module, of_input, _: (of_input[0] * 2, *of_input[1:])
        ),
        attention_written_out,
        checkpointing,
        lambda model: data_of(layer(model).get_parameter(name), weight.clone()),
        lambda model: patch.object(model.get_output_embeddings(), "weight", nn.Parameter(torch.ones(30, 16) / 9)),
    ]
    for change in changes:
        for casts in (nullcontext, under_autocast):
            tolerance = {} if casts is nullcontext else {"rtol": 0.1, "atol": 0.02}
            with ExitStack() as stack:
                for model in (eager, ours):
                    stack.enter_context(change(model))
                with casts():
                    assert_same(step(ours, **padded()), step(eager, **padded()), **tolerance)
            assert_same(step(ours, **padded()), step(eager, **padded()))
    assert report(ours).counters["batches run on some rows"] > 0
