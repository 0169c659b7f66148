"""Repeats a call of a captured graph in eager mode, with the weights, inputs and random numbers of that call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ort_accel.errors import OrtAccelError

CPU = torch.device("cpu")

CHANGED = (
    "logits or hidden states of an earlier call are read, but weights or inputs were changed since, by something other "
    "than an optimizer or a backward; read them before that change, or set compute.loss_only to false"
)

NO_GRADIENT = (
    "a backward goes through logits or hidden states of an earlier call, whose weights or inputs have changed since; "
    "run it before the optimizer's step, or detach them"
)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of random numbers on a device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


class CallInputs:
    """The weights and inputs of a call, with copies of them once they are about to change."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._live = [_copied_if_integers(item) for item in inputs]
        self._before = [_version(item) for item in self._live]
        self._copies: list[Any] | None = None

    @property
    def is_kept(self) -> bool:
        """True if there are copies, so that later changes do not matter."""
        return self._copies is not None

    @property
    def has_changed(self) -> bool:
        """True if one of them is not as it was in the call, as far as versions or copies tell."""
        if self._before != [_version(item) for item in self._live]:
            return True
        pairs = zip(self._copies or (), self._live, strict=False)
        return any(
            isinstance(copy, Tensor) and copy is not live and not torch.equal(copy, live) for copy, live in pairs
        )

    def keep(self, copies: dict[int, Tensor]) -> None:
        """Copy all that training may change, unless it has changed; `copies` has what calls share, by identity."""
        if not self.is_kept and not self.has_changed:
            self._copies = [_copy(item, copies) for item in self._live]

    def values(self) -> tuple[list[Any], bool]:
        """Return them as they were in the call, and True if they are copies, which get no gradients."""
        if not self.has_changed:
            return self._live, False
        if self._copies is None:
            raise OrtAccelError(CHANGED)
        return self._copies, True


class EagerRerun:
    """A call that can be repeated, with its inputs, random numbers, gradient mode and autocast."""

    def __init__(self, eager: Callable[..., Any], inputs: Sequence[Any], on_run: Callable[[], None]) -> None:
        """To be made before the call. `eager` runs the graph in eager mode; `on_run` is called when it does so."""
        self._eager, self._on_run = eager, on_run
        self.given: CallInputs | None = CallInputs(inputs)
        """None once the results are there."""
        self._device = next((item.device for item in inputs if isinstance(item, Tensor) and item.is_cuda), CPU)
        self._random = generator_of(self._device).get_state()
        self._has_gradients = torch.is_grad_enabled()
        kind = self._device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._results: Sequence[Any] = ()

    def output(self, position: int) -> Callable[[], Tensor]:
        """Return a function that gives one of the outputs; the graph runs when the first output is read."""
        return lambda: self.results()[position]

    def results(self) -> Sequence[Any]:
        """Return all outputs, computed with the weights, inputs and random numbers of the call."""
        if self.given is not None:
            self._on_run()
            inputs, are_copies = self.given.values()
            results = self._run(inputs, self._has_gradients and not are_copies)
            refuses_backward = are_copies and self._has_gradients
            self._results = [_without_backward(item) for item in results] if refuses_backward else results
            self.given = None
        return self._results

    def _run(self, inputs: Sequence[Any], gradients: bool) -> Sequence[Any]:
        enabled, dtype = self._autocast
        generator = generator_of(self._device)
        present = generator.get_state()
        generator.set_state(self._random)
        try:
            with torch.set_grad_enabled(gradients), torch.autocast(self._device.type, dtype, enabled=enabled):
                results: Sequence[Any] = self._eager(*inputs)
        finally:
            generator.set_state(present)
        return results


def _copied_if_integers(item: Any) -> Any:
    """Copy token ids, masks and labels at once: scripts write into them, and they are small."""
    return item.clone() if isinstance(item, Tensor) and not item.is_floating_point() else item


def _version(item: object) -> tuple[int, int]:
    """Return a pair that changes whenever a tensor is written to (but in inference mode) or gets other memory."""
    if not isinstance(item, Tensor) or type(item) not in (Tensor, nn.Parameter):
        return -1, -1
    return -1 if item.is_inference() else item._version, item.data_ptr()


def _copy(item: Any, copies: dict[int, Tensor]) -> Any:
    """Copy a tensor of floating point, but for frozen weights."""
    if not isinstance(item, Tensor) or not item.is_floating_point():
        return item
    if isinstance(item, nn.Parameter) and not item.requires_grad:
        return item
    if id(item) not in copies:
        copies[id(item)] = item.detach().clone()
    return copies[id(item)]


class _RefusesBackward(torch.autograd.Function):
    """Gives a tensor that requires a gradient as in eager mode, but whose backward is an error, as weights changed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:  # noqa: ARG004  makes the result require a gradient
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        raise RuntimeError(NO_GRADIENT)


def _without_backward(item: Any) -> Any:
    if not isinstance(item, Tensor) or not item.is_floating_point():
        return item
    with torch.enable_grad():
        return _RefusesBackward.apply(item, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
