"""Running a captured graph once more in eager mode, as it would have run when it was first called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ort_accel.errors import OrtAccelError

CPU = torch.device("cpu")


def generator_of(device: torch.device) -> torch.Generator:
    """What random numbers on a device come from."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


class EagerAgain:
    """A call that was made, with all that its results depend on: inputs, random numbers, gradients and autocast."""

    def __init__(self, eager: Callable[..., Any], inputs: Sequence[Any], told: Callable[[], None]) -> None:
        """Made before the call. `eager` runs the graph in eager mode; `told` is called when it does so."""
        self._eager, self._inputs, self._told = eager, inputs, told
        self._versions = _versions(inputs)
        self._device = next((item.device for item in inputs if isinstance(item, Tensor) and item.is_cuda), CPU)
        self._random = generator_of(self._device).get_state()
        self._gradients = torch.is_grad_enabled()
        kind = self._device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._results: Sequence[Any] | None = None

    def output(self, position: int) -> Callable[[], Tensor]:
        """Gives one of the outputs; the graph runs at the first of them."""
        return lambda: self._run()[position]

    def _run(self) -> Sequence[Any]:
        if self._results is None:
            if self._versions != _versions(self._inputs):
                raise OrtAccelError(
                    "logits or hidden states of an earlier step are read, but its weights or inputs have changed "
                    "since; read them before the optimizer's step, or set compute.loss_only to false"
                )
            self._told()
            enabled, dtype = self._autocast
            generator = generator_of(self._device)
            present = generator.get_state()
            generator.set_state(self._random)
            cast = torch.autocast(self._device.type, dtype, enabled=enabled)
            try:
                with torch.set_grad_enabled(self._gradients), cast:
                    self._results = self._eager(*self._inputs)
            finally:
                generator.set_state(present)
            self._inputs = ()
        return self._results


def _versions(inputs: Sequence[Any]) -> list[int]:
    """How often each tensor was changed. Those of inference mode do not count, and are taken for constant."""
    return [item._version for item in inputs if isinstance(item, Tensor) and not item.is_inference()]
