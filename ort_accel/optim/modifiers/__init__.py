"""Replacement of slow overflow checks and norms in the optimizers of DeepSpeed, Apex and Megatron.

An optimizer is recognized by its methods, not by a version. Each replacement is compared with the original on synthetic
gradients first. If a result differs, the original stays, and the reason is returned.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ort_accel.optim.modifiers import apex, deepspeed, megatron
from ort_accel.optim.modifiers.replacement import Finding

_FINDERS = (deepspeed.find, apex.find, megatron.find)


@dataclass(frozen=True)
class Replaced:
    """The methods that were replaced in a framework's optimizer, and the reasons why others were not."""

    maker: str
    methods: tuple[str, ...] = ()
    refusals: tuple[str, ...] = field(default=())


def replace_checks(optimizer: object) -> Replaced | None:
    """Replace the slow checks of a framework's optimizer, in place. Returns None if no known framework made it.

    An optimizer inside Accelerate's wrapper is found, too. With several processes, all of them must call this.
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


def maker_of(optimizer: object) -> str | None:
    """Returns the framework that made an optimizer or one inside it; None if it is unknown."""
    found = _find(optimizer)
    return None if found is None else found.maker


def _find(optimizer: object) -> Finding | None:
    while optimizer is not None:
        for find in _FINDERS:
            if (found := find(optimizer)) is not None:
                return found
        optimizer = getattr(optimizer, "optimizer", None)
    return None
