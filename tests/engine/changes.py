"""A small model with all that a training may change between two steps, and a check that each change is followed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from tests.against_eager import Trace, assert_same, compilations, pair, step

SWITCH = "ORT_ACCEL_TESTS_SWITCH"


FACTOR = 1.0


REGISTRY = {"scale": lambda x: x}


def helper(x, power=1.0, *, shift=0.0):
    return x * FACTOR * power + shift


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


@contextmanager
def done_and_undone(do: Callable[[], object], undo: Callable[[], object]) -> Iterator[None]:
    do()
    try:
        yield
    finally:
        undo()


def entry_of(mapping, key, value):
    return patch.dict(mapping, {key: value})


def forward_of(module: nn.Module, wrap: Callable[..., object] = lambda forward: lambda x: forward(x) * 2) -> Change:
    return patch.object(module, "forward", wrap(module.forward))


def data_of(tensor: torch.Tensor, value: torch.Tensor) -> AbstractContextManager:
    before = tensor.data
    return done_and_undone(lambda: setattr(tensor, "data", value), lambda: setattr(tensor, "data", before))


def doubling(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def setting(put: Callable[[object], object], value: object, before: object) -> Change:
    return lambda _: done_and_undone(lambda: put(value), lambda: put(before))


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


def pair_of_nets() -> tuple[Net, Net]:
    """A model in eager mode and one on the engine, which go through all changes of a file."""
    torch.manual_seed(0)
    return pair(Net())


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
