"""The first screen of a report's page: did it help, what ran where, and what can be better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from ort_accel.observe.charts import track
from ort_accel.observe.headline import percent
from ort_accel.observe.hints import hints
from ort_accel.observe.memory_plots import Data
from ort_accel.observe.page import Content, Markup, joined, tag
from ort_accel.reporting.segments import Kernels
from ort_accel.reporting.timings import EAGER

STEP_TIME, EAGER_STEP_TIME = "ort/step_time", "eager/step_time"
MAX_HINTS = 3
_COMPARISON = "engine.compare_with_eager"


@dataclass(frozen=True)
class Beside:
    """The seconds of a typical step, beside those of eager PyTorch."""

    ours: float
    eager: float

    @property
    def is_faster(self) -> bool:
        return self.ours <= self.eager

    def __str__(self) -> str:
        if self.is_faster:
            return f"{self.eager / self.ours:.2f} times as fast"
        return f"{self.ours / self.eager:.2f} times as slow"


def beside_eager(data: Data) -> Beside | None:
    """Returns both times: of whole steps that a script measured, or of forward and backward in compared steps."""
    ours, eager = (typical(data, name) for name in (STEP_TIME, EAGER_STEP_TIME))
    if ours and eager:
        return Beside(ours, eager)
    found = data["comparison"]
    if found and found["eager_seconds"]:
        return Beside(found["ratio"] * found["eager_seconds"], found["eager_seconds"])
    return None


def typical(data: Data, name: str) -> float:
    """Returns the median of a figure over the steps; 0 if there is none."""
    return float(median([point["mean"] for point in data["series"].get(name, ())] or [0.0]))


def answers(data: Data) -> Markup:
    """Returns the three answers."""
    boxes = (
        _answer("Did it help?", *_helped(data)),
        _answer("What ran where?", *_where(data)),
        _answer("What can be better?", *_better(data)),
    )
    return tag("div", boxes, class_="answers")


def _answer(question: str, headline: Content, *rest: Content) -> Markup:
    return tag("div", tag("h2", question), tag("b", headline), *rest, class_="answer")


def _helped(data: Data) -> Sequence[Content]:
    found = beside_eager(data)
    if found is None:
        return "Not compared", tag("p", _why_not_compared(data), _set_up(data))
    said = f"A step takes {_time(found.ours)}, and {_time(found.eager)} in eager PyTorch."
    runner = (data["comparison"] or {}).get("runner")
    if runner == EAGER:
        said += " Eager PyTorch runs the steps."
    state = "applied" if found.is_faster else "refused"
    return tag("span", str(found), class_=state), tag("p", said, _set_up(data, found))


def _why_not_compared(data: Data) -> str:
    reason = next((item["reason"] for item in data["features"] if item["name"] == _COMPARISON), "")
    return f"No step was compared with eager PyTorch{f': {reason}' if reason else ''}."


def _set_up(data: Data, beside: Beside | None = None) -> str:
    seconds = sum(data["timings"].values())
    if not seconds:
        return ""
    if beside is None or beside.ours >= beside.eager:
        return f" The set-up took {_time(seconds)}."
    return f" The set-up took {_time(seconds)}, which {ceil(seconds / (beside.eager - beside.ours)):,} steps win back."


def _where(data: Data) -> Sequence[Content]:
    work = {item["kernels"]: item["flops"] for item in data["kernels"]}
    nodes = {item["kernels"]: item["nodes"] for item in data["kernels"]}
    amounts = work if any(work.values()) else nodes
    whole, all_nodes = sum(amounts.values()), sum(nodes.values())
    if not whole:
        return "Nothing was compiled yet", tag("p", "The model was not called since it was accelerated.")
    inside = percent(whole - amounts[Kernels.OUTSIDE.value], whole)
    rows = (
        tag(
            "tr",
            tag("th", name, scope="row", class_=f"kernels-{number}"),
            tag("td", percent(work[name], sum(work.values())), class_="number"),
            tag("td", percent(nodes[name], all_nodes), class_="number"),
        )
        for number, name in enumerate(nodes)
    )
    heads = tag("tr", tag("td"), (tag("th", name, scope="col", class_="number") for name in ("FLOPs", "nodes")))
    bar = track(amounts, whole)
    return f"{inside} in ONNX Runtime", bar, tag("table", tag("thead", heads), tag("tbody", rows))


def _better(data: Data) -> Sequence[Content]:
    found = hints(data)
    if not found:
        return "Nothing to change", tag("p", "Nothing in this report asks for it.")
    items = (
        tag("li", joined(tag("code", hint.yaml), tag("br")) if hint.yaml else "", hint.text)
        for hint in found[:MAX_HINTS]
    )
    rest = len(found) - MAX_HINTS
    more = tag("p", f"{rest} more {'stand' if rest > 1 else 'stands'} below.") if rest > 0 else ""
    return f"{len(found)} hint{'s' if len(found) > 1 else ''}", tag("ul", items), more


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"
