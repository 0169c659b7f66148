"""What happens when PyTorch has to run something: said, or refused, as the configuration asks."""

from __future__ import annotations

import logging

from ort_accel.capture.dynamo import said_by
from ort_accel.config import Config
from ort_accel.errors import OrtAccelError, first_line
from ort_accel.observe.headline import DETAILS
from ort_accel.reporting import Fallback, Reason, Report

LOG = logging.getLogger("ort_accel")

SHOWN = 3
"""So many kinds of operators are named in a warning."""
LONGEST_CHARACTERS = 120
"""So much is said of each."""


class FallbackError(OrtAccelError):
    """PyTorch would have to run operators although `engine.fallback` is `error`."""


class FallbackPolicy:
    """`engine.fallback` and `engine.fallback_retry` at work for one model."""

    def __init__(self, config: Config, report: Report) -> None:
        self._engine, self._report = config.engine, report
        self._said: set[tuple[str, Reason]] = set()

    def check(self, graph: str) -> None:
        """Look at the report after a graph was lowered."""
        found = [item for item in self._report.fallbacks if not item.reason.is_choice]
        if found and self._engine.fallback == "error":
            raise FallbackError(
                f"{graph}: engine.fallback is error, and PyTorch would run\n"
                + "\n".join(f"  {_line(item)}" for item in found)
                + "\nSet engine.fallback to warn or report to let PyTorch run them."
            )
        self._say([item for item in found if (item.op, item.reason) not in self._said])

    def not_compiled(self, what: str, error: Exception, where: str = "") -> None:
        """Note that a fault in a compiler leaves a graph, a call, or code to PyTorch."""
        LOG.debug("%s is left to PyTorch", what, exc_info=error)
        self._report.fallback(what, Reason.NOT_COMPILED, said_by(error), where=where)
        self.check(what)

    def failed(self, error: Exception) -> bool:
        """Note that ONNX Runtime failed where PyTorch did not; returns whether to try it again."""
        text = first_line(error) or type(error).__name__
        self._report.fallback("a whole segment", Reason.FAILED, text)
        if self._engine.fallback == "error":
            raise FallbackError(f"engine.fallback is error, and ONNX Runtime failed: {text}") from error
        retry = "it is tried again next step" if self._engine.fallback_retry else "PyTorch runs that part from now on"
        LOG.warning("ONNX Runtime failed on a part of the model, PyTorch ran it; %s: %s", retry, text)
        return self._engine.fallback_retry

    def _say(self, items: list[Fallback]) -> None:
        self._said.update((item.op, item.reason) for item in items)
        if items and self._engine.fallback == "warn":
            LOG.warning("PyTorch runs what ONNX Runtime cannot: %s; %s", _in_short(items), DETAILS)


def _in_short(items: list[Fallback]) -> str:
    """The first kinds and where they come from; the report has the rest, and what ONNX Runtime says of each."""
    rest = [f"{len(items) - SHOWN} more kinds"] if len(items) > SHOWN else []
    return "; ".join([*map(_shortened, items[:SHOWN]), *rest])


def _shortened(item: Fallback) -> str:
    place = f"first at {item.where}" if item.where else item.detail
    text = f"{item.op} ({item.reason}{f', {place}' if place else ''})"
    return text if len(text) <= LONGEST_CHARACTERS else f"{text[:LONGEST_CHARACTERS]} ..."


def _line(item: Fallback) -> str:
    detail = f", {item.detail}" if item.detail else ""
    where = f", first at {item.where}" if item.where else ""
    return f"{item.op} x{item.count} ({item.reason}{detail}{where})"
