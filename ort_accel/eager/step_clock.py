"""Times training steps of a model: its forward calls and the backward, without the script's work in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ort_accel.runtime.lazy_tensor import LazyTensor

Result = TypeVar("Result")

MOST_CALLS = 64
"""Calls without a backward after which a step is given up."""


class Moment(Protocol):
    """A point in time on the host or on a device."""

    def until(self, end: Self) -> float | None:
        """Seconds up to a later moment; None while the device has not reached it."""


class HostMoment:
    """A moment on the host."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def until(self, end: Self) -> float:
        """Seconds up to a later moment."""
        return end._seconds - self._seconds


class DeviceMoment:
    """The moment at which a CUDA device reaches the next operation that the host launches."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def until(self, end: Self) -> float | None:
        """Seconds up to a later moment; None while the device has not reached it."""
        if not end._event.query():  # type: ignore[no-untyped-call]
            return None
        return float(self._event.elapsed_time(end._event)) / 1e3


class Step:
    """One training step: all calls up to the end of their backward."""

    def __init__(self, now: Callable[[], Moment], on_end: Callable[[Step], None]) -> None:
        """`on_end` is called once the backward has ended."""
        self._now, self._on_end = now, on_end
        self._parts: list[tuple[Moment, Moment]] = []
        self._backward: Moment | None = None
        self.calls = 0
        self.elements = 0
        """Elements of all inputs, by which steps of different sizes are compared."""
        self.is_typical = True
        """False if something happened in the step that other steps lack, such as a compilation."""
        self.is_over = False

    @property
    def was_abandoned(self) -> bool:
        """True if an error has ended its backward."""
        return self._backward is not None and not self.is_over and torch._C._current_graph_task_id() == -1

    def call(self, forward: Callable[[], Result], inputs: Iterable[object]) -> Result:
        """Run a forward as part of this step."""
        self.calls += 1
        self.elements += sum(item.numel() for item in inputs if isinstance(item, Tensor))
        begin = self._now()
        result = forward()
        self._parts.append((begin, self._now()))
        root = _differentiable(result)
        if root is not None:
            root.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        return result

    def seconds(self) -> float | None:
        """Return how long forward and backward took; None while a device still computes."""
        spent = [begin.until(end) for begin, end in self._parts]
        known = [each for each in spent if each is not None]
        return sum(known) if len(known) == len(spent) else None

    def _backward_begins(self, _: Tensor) -> None:
        if self._backward is None and not self.is_over:
            self._backward = self._now()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        assert self._backward is not None
        self._parts.append((self._backward, self._now()))
        self.is_over = True
        self._on_end(self)


def _differentiable(result: object) -> Tensor | None:
    """Return the result that a backward most likely begins at: a scalar, or else the first with a gradient."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    given = [leaf for leaf in leaves if not isinstance(leaf, LazyTensor) and leaf.requires_grad and not leaf.is_leaf]
    return min(given, key=lambda leaf: leaf.ndim, default=None)
