"""Hooks that come and go between two steps take effect from the next step on, as in eager mode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.nn.modules import module as module_hooks

from tests.against_eager import ATOL, RTOL, pair
from tests.engine.changes import Block, Change, Net, assert_as_eager, assert_followed, first, pair_of_nets, taken, twice
from tests.tiers import mostly_long


def twice_gradient_of_input(module, of_input, of_output):
    return twice(of_input)


def doubled_output(module, args, output):
    output.register_hook(twice)


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
"""Changes that `make test` makes: one of each mechanism by which the engine notices them."""


@pytest.fixture(scope="module")
def models() -> tuple[Net, Net]:
    return pair_of_nets()


@pytest.mark.parametrize("kind", mostly_long(HOOKS, *SHORT_HOOKS))
def test_hooks(kind, models):
    assert_followed(models, HOOKS[kind], of_the_process=False)


@pytest.mark.parametrize("kind", mostly_long(HOOKS_ON_ALL_MODULES, "forward", "backward"))
def test_hooks_on_all_modules(kind, models):
    assert_followed(models, HOOKS_ON_ALL_MODULES[kind], of_the_process=True)


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
