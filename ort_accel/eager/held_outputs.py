"""Outputs that were not computed, and that a script still holds when weights change.

They are computed with the weights of their call, so these are copied before they change, if a script holds such
outputs by then: within the optimizer's step at the latest. Scripts that change weights themselves do so behind a
backward. So weights are copied before each backward until a step has shown that optimizers alone change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakSet, finalize, ref

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ort_accel.capture.unused_outputs import nodes_of
from ort_accel.eager.rerun import EagerAgain, Given


class KeptOutputs:
    """The calls of one model of which outputs may still be asked for."""

    def __init__(self) -> None:
        self._calls: WeakSet[EagerAgain] = WeakSet()
        self._probe: Given | None = None
        """Weights that were copied before a backward, until an optimizer steps."""
        self._only_optimizers: bool | None = None
        """True if nothing else changes weights; None until a step has shown it."""
        weak = ref(self)

        def before_step(*_: Any) -> None:
            if (kept := weak()) is not None:
                kept.before_step()

        finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def add(self, call: EagerAgain, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Take up a call; these are the outputs that were computed, and what they were computed from."""
        self._calls.add(call)
        node = None if self._only_optimizers else next(nodes_of(outputs, inputs), None)
        if node is not None:
            node.register_prehook(partial(_before_backward, ref(self), ref(call)))

    def before_backward(self, call: EagerAgain) -> None:
        """Told of the backward of a call whose outputs are still held."""
        if not self._only_optimizers:
            self._probe = None
            self._keep()
            self._probe = call.given if self._only_optimizers is None else None

    def before_step(self) -> None:
        """Told of an optimizer that is about to change weights, this model's or others."""
        probe, self._probe = self._probe, None
        if probe is not None and self._only_optimizers is None:
            self._only_optimizers = not probe.has_changed
        self._keep()

    def _keep(self) -> None:
        """Copy the weights of calls that are held. Those held since the last time are computed: they are wanted."""
        calls = [(call, call.given) for call in self._calls if call.given is not None]
        held = [given for _, given in calls if not given.is_kept]
        if any(given.has_changed for given in held):
            self._only_optimizers = False
        for call, given in calls:
            if held and given.is_kept:
                call.results()
        copies: dict[int, Tensor] = {}
        for given in held:
            given.keep(copies)


def _before_backward(kept: ref[KeptOutputs], call: ref[EagerAgain], _: Any) -> None:
    outputs, made = kept(), call()
    if outputs is not None and made is not None:
        outputs.before_backward(made)
