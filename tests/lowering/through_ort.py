"""Runs a function of tensors through the lowerings, without autograd and without any rule about what is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.compiler.compile_graph import Lowering, lower_graph
from ort_accel.reporting.report import Report
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions

OPSET = 20


class Lowered:
    """A function as lowered for some inputs; `refusals` are the nodes that PyTorch runs, with reasons."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor], dynamic: bool = False) -> None:
        self.report = Report()
        lowering = Lowering(Sessions(SessionSettings(threads=1)), OPSET, self.report, failed=_raise, for_speed=False)
        traced = make_fx(_flat(function), tracing_mode="symbolic" if dynamic else "fake")(*inputs)
        self._program = lower_graph(traced, lowering, "forward 0")
        self.refusals = {item.op: f"{item.reason}: {item.detail}" for item in self.report.fallbacks}

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return self._program(list(inputs))


def _raise(error: Exception) -> bool:
    raise error


def _flat(function: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = function(*inputs)
        return [results] if isinstance(results, torch.Tensor) else [item for item in results if item is not None]

    return call


def assert_like_eager(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    ort: bool = True,
    dynamic: bool = False,
    atol: float | None = None,
) -> None:
    """Results equal eager's in value, type, shape, NaN and infinity; ORT ran all of it, unless `ort` is off."""
    lowered = Lowered(function, inputs, dynamic)
    assert not (ort and lowered.refusals), f"left to PyTorch: {lowered.refusals}"
    expected = _flat(function)(*inputs)
    rtol = None if atol is None else 1e-3
    for _ in range(2):
        torch.testing.assert_close(lowered(*inputs), expected, equal_nan=True, rtol=rtol, atol=atol)
