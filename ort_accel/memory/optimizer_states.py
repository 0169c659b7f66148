"""Bytes of the state that an optimizer keeps for its parameters, before it has made a step.

The optimizer itself tells: a copy of it steps on fake tensors, which have sizes and no memory. That needs no list of
optimizers, and follows their options. A step may end early, where a kernel needs memory or a number. The state exists
by then, since optimizers make it first.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer


def state_bytes(optimizer: object, parameters: Sequence[Tensor]) -> int | None:
    """Returns the bytes of state that an optimizer will keep for these parameters; None if it does not tell.

    fp32 copies of weights (`MasterWeightOptimizer`) count as state. Pages of a paged optimizer count as memory.
    """
    inner, masters = _unwrapped(optimizer)
    if inner is None:
        return None
    asked = {id(parameter) for parameter in parameters}
    groups = [(group, parameter) for group in inner.param_groups for parameter in group["params"]]
    known: dict[object, int | None] = {}
    total = 0
    for group, parameter in groups:
        original = masters.get(id(parameter), parameter)
        if id(original) not in asked:
            continue
        if inner.state.get(parameter):
            found: int | None = sum(one.nbytes for one in _tensors(inner.state[parameter]))
        else:
            options = {name: value for name, value in group.items() if name != "params"}
            key = (repr(options), parameter.shape, parameter.dtype, parameter.device)
            if key not in known:
                known[key] = _bytes_of_first_state(inner, options, parameter)
            found = known[key]
        if found is None:
            return None
        total += found + (parameter.nbytes if original is not parameter else 0)
    return total


def optimizer_of(parameters: Sequence[Tensor]) -> Optimizer | None:
    """Returns an optimizer of this process that trains one of these parameters; None where there is none yet.

    Of an optimizer and a wrapper around it, such as Accelerate's, either may be returned.
    """
    asked = set(map(id, parameters))
    optimizers = (each for each in gc.get_objects() if issubclass(type(each), Optimizer))
    return next((each for each in optimizers if not asked.isdisjoint(map(id, _trained(each)))), None)


def _trained(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields the parameters of an optimizer; where it steps on fp32 copies, those that these stand for."""
    yield from vars(optimizer).get("_params", ())
    if "param_groups" in vars(optimizer):
        yield from (parameter for group in optimizer.param_groups for parameter in group["params"])


def _unwrapped(optimizer: object) -> tuple[Optimizer | None, dict[int, Tensor]]:
    """Returns the innermost optimizer, and the parameter of each fp32 copy that it steps on, by the copy's id."""
    masters: dict[int, Tensor] = {}
    while (inside := vars(optimizer).get("optimizer")) is not None:
        pairs = zip(vars(optimizer).get("_masters", ()), vars(optimizer).get("_params", ()), strict=True)
        masters |= {id(master): parameter for master, parameter in pairs}
        optimizer = inside
    return (optimizer if isinstance(optimizer, Optimizer) else None), masters


def _bytes_of_first_state(optimizer: Optimizer, options: dict[str, Any], parameter: Tensor) -> int | None:
    """Returns the bytes of the state after a first step on a parameter; None if the step fails before there is any."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake = torch.nn.Parameter(torch.empty_like(parameter, device=parameter.device))
        fake.grad = torch.empty_like(fake)
        clone = _clone(optimizer, {**options, "params": [fake]})
        step: Callable[..., object] = getattr(type(clone).step, "__wrapped__", type(clone).step)
        has_failed = True
        with suppress(Exception):
            step(clone)
            has_failed = False
    state = clone.state.get(fake, {})
    if has_failed and not state:
        return None
    return sum(one.nbytes for one in _tensors(state) if isinstance(one, FakeTensor))


def _clone(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Returns a copy with one group and no state, which shares no dict with the optimizer and pages no memory."""
    clone: Optimizer = object.__new__(type(optimizer))  # a copy would have groups and state only
    clone.__dict__ = {name: dict(value) if type(value) is dict else value for name, value in vars(optimizer).items()}
    clone.param_groups, clone.state = [group], defaultdict(dict)
    if hasattr(clone, "is_paged"):
        clone.is_paged = False
    return clone


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a state, and in objects that it holds, such as a projection."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))
