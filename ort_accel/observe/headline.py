"""The one line about a model: the share of its work that ONNX Runtime runs, or its other runner."""

from __future__ import annotations

from collections import Counter

from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report

DETAILS = "details: print(ort_accel.report(model))"
_UNCAPTURED = (Reason.GRAPH_BREAK, Reason.NOT_COMPILED)
"""Reasons why code is in no segment. PyTorch runs it in eager mode, and its work is not counted."""


def headline(report: Report) -> str:
    """Returns the line that is logged once a model has trained a step."""
    took = f", set up in {_seconds(report.set_up_seconds)}" if report.timings else ""
    return f"{work_summary(report)}{took}; {DETAILS}"


def work_summary(report: Report) -> str:
    """Returns the share of the estimated FLOPs that ONNX Runtime runs, at the sizes that graphs were compiled with."""
    ours, whole = report.work
    outside = sum(item.count for item in report.fallbacks if item.reason in _UNCAPTURED)
    if not whole:
        return _without_graphs(report)
    if report.comparison is not None and not report.comparison.is_on_engine:
        return str(report.comparison)
    captured = "captured work" if outside else "work"
    rest = f", and {_places(outside)} of the model in eager PyTorch" if outside else ""
    if not ours:
        return f"PyTorch runs all of the {captured} ({_main_reason(report)}), ONNX Runtime 0 %{rest}"
    return f"{percent(ours, whole)} of the {captured} on ONNX Runtime{rest}"


def percent(part: float, whole: float) -> str:
    """Returns a rounded percentage, which is 0 or 100 only if it is exact."""
    if not whole:
        return "-"
    rounded = round(100 * part / whole)
    if rounded == 100 and part < whole:
        return "> 99 %"
    return "< 1 %" if rounded == 0 and part else f"{rounded} %"


def _without_graphs(report: Report) -> str:
    if (engine := report.features.get("engine")) is not None and engine.reason:
        return f"PyTorch runs this model: {engine.reason}"
    if report.fallbacks:
        return f"PyTorch runs this model, and no graph of it was compiled ({_main_reason(report)})"
    return "nothing was compiled yet: the model was not called since it was accelerated"


def _main_reason(report: Report) -> str:
    """Returns the reason of most nodes."""
    counts: Counter[Reason] = Counter()
    for item in report.fallbacks:
        counts[item.reason] += item.count
    return f"mostly {counts.most_common(1)[0][0]}" if counts else "no reason was recorded"


def _places(count: int) -> str:
    return f"{count} place{'s' if count != 1 else ''}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
