"""Reports or refuses what PyTorch has to run, as the configuration asks (`engine.fallback`)."""

from __future__ import annotations

from ort_accel.capture.dynamo import error_summary
from ort_accel.config import Config
from ort_accel.errors import OrtAccelError, first_line
from ort_accel.observe.headline import DETAILS
from ort_accel.observe.logs import LOG
from ort_accel.reporting.fallbacks import Fallback, Reason
from ort_accel.reporting.report import Report

SHOWN_KINDS = 3
"""The number of kinds of operators that a warning names."""
LONGEST_CHARACTERS = 120
"""The length to which each is cut."""


class FallbackError(OrtAccelError):
    """PyTorch would have to run operators although `engine.fallback` is `error`."""


class FallbackPolicy:
    """Applies `engine.fallback` and `engine.fallback_retry` to one model."""

    def __init__(self, config: Config, report: Report) -> None:
        self._engine, self._report = config.engine, report
        self._warned: set[tuple[str, Reason]] = set()

    def check(self, graph: str) -> None:
        """Warn of, or refuse, fallbacks that are in the report after a graph was lowered."""
        found = [item for item in self._report.fallbacks if item.is_forced]
        if found and self._engine.fallback == "error":
            raise FallbackError(
                f"{graph}: engine.fallback is error, and PyTorch would run\n"
                + "\n".join(f"  {_line(item)}" for item in found)
                + "\nSet engine.fallback to warn or report to let PyTorch run them."
            )
        self._warn([item for item in found if (item.op, item.reason) not in self._warned])

    def not_compiled(self, what: str, error: Exception, where: str = "") -> None:
        """Report that a graph, a call or code is left to PyTorch, as a compiler failed on it."""
        LOG.debug("%s is left to PyTorch", what, exc_info=error)
        self._report.fallback(what, Reason.NOT_COMPILED, error_summary(error), where=where)
        self.check(what)

    def failed(self, error: Exception) -> bool:
        """Report that ONNX Runtime failed on a segment; return True if it is to try again."""
        text = first_line(error) or type(error).__name__
        self._report.fallback("a whole segment", Reason.FAILED, text)
        if self._engine.fallback == "error":
            raise FallbackError(f"engine.fallback is error, and ONNX Runtime failed: {text}") from error
        retry = "it is tried again next step" if self._engine.fallback_retry else "PyTorch runs that part from now on"
        LOG.warning("ONNX Runtime failed on a part of the model, PyTorch ran it; %s: %s", retry, text)
        return self._engine.fallback_retry

    def _warn(self, items: list[Fallback]) -> None:
        self._warned.update((item.op, item.reason) for item in items)
        if items and self._engine.fallback == "warn":
            LOG.warning("PyTorch runs what ONNX Runtime cannot: %s; %s", _in_short(items), DETAILS)


def _in_short(items: list[Fallback]) -> str:
    """Name the first kinds and the lines they come from; the report has the others, and details."""
    rest = [f"{len(items) - SHOWN_KINDS} more kinds"] if len(items) > SHOWN_KINDS else []
    return "; ".join([*map(_shortened, items[:SHOWN_KINDS]), *rest])


def _shortened(item: Fallback) -> str:
    place = f"first at {item.where}" if item.where else item.detail
    text = f"{item.op} ({item.reason}{f', {place}' if place else ''})"
    return text if len(text) <= LONGEST_CHARACTERS else f"{text[:LONGEST_CHARACTERS]} ..."


def _line(item: Fallback) -> str:
    detail = f", {item.detail}" if item.detail else ""
    where = f", first at {item.where}" if item.where else ""
    return f"{item.op} x{item.count} ({item.reason}{detail}{where})"
