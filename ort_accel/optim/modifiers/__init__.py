"""The slow checks in optimizers that DeepSpeed, Apex and Megatron make, replaced where equal results are shown.

An optimizer is known by what it can do, not by a version. Each method is tried against the original on made-up
gradients before it is replaced; where an answer differs the original stays, and the reason is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ort_accel.optim.modifiers import apex, deepspeed, megatron
from ort_accel.optim.modifiers.replacement import Finding

_FINDERS = (deepspeed.find, apex.find, megatron.find)


@dataclass(frozen=True)
class Replaced:
    """Which methods were replaced in a framework's optimizer, and which were not and why."""

    maker: str
    methods: tuple[str, ...] = ()
    refusals: tuple[str, ...] = field(default=())


def replace_checks(optimizer: Any) -> Replaced | None:
    """Replace the slow checks of a framework's optimizer, in place. None if no framework that is known made it.

    An optimizer inside Accelerate's wrapper is found. With several processes, all of them must call this.
    """
    found = _find(optimizer)
    if found is None:
        return None
    if found.refusal:
        return Replaced(found.maker, refusals=(found.refusal,))
    methods, refusals = [], []
    for each in found.replacements:
        difference = "" if each.is_in_place() else each.difference()
        if found.agree(not difference):
            if not each.is_in_place():
                each.install()
            methods.append(each.name)
        else:
            refusals.append(difference or f"{each.name} answers differently in another process")
    return Replaced(found.maker, tuple(methods), tuple(refusals))


def maker_of(optimizer: Any) -> str | None:
    """The framework that made an optimizer, or one inside it; None if none that is known did."""
    found = _find(optimizer)
    return None if found is None else found.maker


def _find(optimizer: Any) -> Finding | None:
    while optimizer is not None:
        for find in _FINDERS:
            if (found := find(optimizer)) is not None:
                return found
        optimizer = getattr(optimizer, "optimizer", None)
    return None
