"""Running a captured graph once more in eager mode, as it would have run when it was first called."""

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
    """What random numbers on a device come from."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


class Given:
    """Weights and inputs of a call, with copies of them once they are about to change."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._live = [_own(item) for item in inputs]
        self._before = [_state(item) for item in self._live]
        self._copies: list[Any] | None = None

    @property
    def is_kept(self) -> bool:
        """True if nothing that is done to weights and inputs matters any more."""
        return self._copies is not None

    @property
    def has_changed(self) -> bool:
        """True if one of them is not as it was in the call, as far as versions or copies tell."""
        if self._before != [_state(item) for item in self._live]:
            return True
        pairs = zip(self._copies or (), self._live, strict=False)
        return any(
            isinstance(kept, Tensor) and kept is not live and not torch.equal(kept, live) for kept, live in pairs
        )

    def keep(self, copies: dict[int, Tensor]) -> None:
        """Copy all that training may change of them, as long as they are those of the call.

        `copies` has the copies that several calls share, by the identity of the tensor.
        """
        if not self.is_kept and not self.has_changed:
            self._copies = [_copy(item, copies) for item in self._live]

    def values(self) -> tuple[list[Any], bool]:
        """Them as they were in the call, and whether they are those of the past, which get no gradients."""
        if not self.has_changed:
            return self._live, False
        if self._copies is None:
            raise OrtAccelError(CHANGED)
        return self._copies, True


class EagerAgain:
    """A call that was made, with all that its results depend on: inputs, random numbers, gradients and autocast."""

    def __init__(self, eager: Callable[..., Any], inputs: Sequence[Any], told: Callable[[], None]) -> None:
        """Made before the call. `eager` runs the graph in eager mode; `told` is called when it does so."""
        self._eager, self._told = eager, told
        self.given: Given | None = Given(inputs)
        """None once the results are there."""
        self._device = next((item.device for item in inputs if isinstance(item, Tensor) and item.is_cuda), CPU)
        self._random = generator_of(self._device).get_state()
        self._gradients = torch.is_grad_enabled()
        kind = self._device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._results: Sequence[Any] = ()

    def output(self, position: int) -> Callable[[], Tensor]:
        """Gives one of the outputs; the graph runs at the first of them."""
        return lambda: self.results()[position]

    def results(self) -> Sequence[Any]:
        """All outputs, with the weights, inputs and random numbers of the call."""
        if self.given is not None:
            self._told()
            inputs, is_past = self.given.values()
            results = self._run(inputs, self._gradients and not is_past)
            self._results = [_past(item) for item in results] if is_past and self._gradients else results
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


def _own(item: Any) -> Any:
    """Token ids, masks and labels are copied at once: scripts write into them, and they are small."""
    return item.clone() if isinstance(item, Tensor) and not item.is_floating_point() else item


def _state(item: Any) -> tuple[int, int]:
    """Changes whenever a tensor is written to, or looks at other memory. Inference mode counts no writes."""
    if type(item) not in (Tensor, nn.Parameter):
        return -1, -1
    return -1 if item.is_inference() else item._version, item.data_ptr()


def _copy(item: Any, copies: dict[int, Tensor]) -> Any:
    """A frozen weight stays as it is; so do numbers."""
    if not isinstance(item, Tensor) or not item.is_floating_point():
        return item
    if isinstance(item, nn.Parameter) and not item.requires_grad:
        return item
    if id(item) not in copies:
        copies[id(item)] = item.detach().clone()
    return copies[id(item)]


def _differs(kept: Any, live: Any) -> bool:
    return isinstance(kept, Tensor) and kept is not live and not torch.equal(kept, live)


class _OfThePast(torch.autograd.Function):
    """Gives a tensor that has a gradient in name, as its weights are gone: its backward is an error, as eager's is."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:  # noqa: ARG004  a gradient that is asked for
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        raise RuntimeError(NO_GRADIENT)


def _past(item: Any) -> Any:
    if not isinstance(item, Tensor) or not item.is_floating_point():
        return item
    with torch.enable_grad():
        return _OfThePast.apply(item, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
