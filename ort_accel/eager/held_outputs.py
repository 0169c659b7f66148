"""Keeps what skipped outputs are computed from, while a script holds such outputs and weights change.

Skipped outputs are computed with the weights of their call. The weights are copied before they change, at the latest
within the optimizer's step, if a script holds such outputs by then. Scripts that change weights themselves do so behind
a backward. So weights are copied before each backward until a step has shown that only optimizers change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakSet, finalize, ref

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ort_accel.capture.unused_outputs import backward_nodes
from ort_accel.eager.rerun import CallInputs, EagerRerun


class HeldOutputs:
    """The calls of one model whose skipped outputs may still be read."""

    def __init__(self) -> None:
        self._calls: WeakSet[EagerRerun] = WeakSet()
        self._probe: CallInputs | None = None
        """Weights that were copied before a backward, until an optimizer steps."""
        self._only_optimizers: bool | None = None
        """True if nothing else changes weights; None until a step has shown it."""
        weak = ref(self)

        def before_step(*_: object) -> None:
            if (kept := weak()) is not None:
                kept.before_step()

        finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def add(self, call: EagerRerun, outputs: Sequence[object], inputs: Sequence[object]) -> None:
        """Add a call, with the outputs that were computed and the inputs that they were computed from."""
        self._calls.add(call)
        node = None if self._only_optimizers else next(backward_nodes(outputs, inputs), None)
        if node is not None:
            node.register_prehook(partial(_before_backward, ref(self), ref(call)))

    def before_backward(self, call: EagerRerun) -> None:
        """Copy weights before the backward of a call whose outputs are held, unless only optimizers change them."""
        if not self._only_optimizers:
            self._probe = None
            self._keep()
            self._probe = call.given if self._only_optimizers is None else None

    def before_step(self) -> None:
        """Copy weights before an optimizer, of this model or another, changes some."""
        probe, self._probe = self._probe, None
        if probe is not None and self._only_optimizers is None:
            self._only_optimizers = not probe.has_changed
        self._keep()

    def _keep(self) -> None:
        """Copy the weights of new calls, and compute the outputs of older ones: a script that holds them wants them."""
        calls = [(call, call.given) for call in self._calls if call.given is not None]
        uncopied = [given for _, given in calls if not given.is_kept]
        if any(given.has_changed for given in uncopied):
            self._only_optimizers = False
        for call, given in calls:
            if uncopied and given.is_kept:
                call.results()
        copies: dict[int, Tensor] = {}
        for given in uncopied:
            given.keep(copies)


def _before_backward(kept: ref[HeldOutputs], call: ref[EagerRerun], _: object) -> None:
    outputs, held = kept(), call()
    if outputs is not None and held is not None:
        outputs.before_backward(held)
