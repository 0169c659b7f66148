"""What the plots of memory show, apart from how they are drawn: a step by what its memory is for, and the frontier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ort_accel.observe.charts import Line, Mark

Data = Mapping[str, Any]
"""What `Report.to_dict` gives."""

MIB = 2**20
APART = 1.05
"""Two measured figures are shown both where one is so many times the other."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What all of them have."""

    caption: str
    x_name: str
    measured: list[Mark]
    y_name: str = "MiB"


@dataclass(frozen=True, kw_only=True)
class StepPlot(Plot):
    """Memory over the step of a graph, by what it is for."""

    layers: Mapping[str, list[float]]
    """MiB in each segment."""
    beginnings: list[Mark]
    """Where the backward and the optimizer's step begin."""


@dataclass(frozen=True, kw_only=True)
class FrontierPlot(Plot):
    """What each choice of what is computed again or moved costs in a step, and the peak that it leads to."""

    lines: list[Line]


def foreseen(data: Data) -> list[Data]:
    """Returns the graphs whose step was predicted; of those that take the same the last one."""
    graphs = [graph for graph in data.get("memory", ()) if graph["stages"]]
    return [graph for index, graph in enumerate(graphs) if all(_differ(graph, other) for other in graphs[index + 1 :])]


def _differ(graph: Data, other: Data) -> bool:
    return bool(graph["stages"] != other["stages"] or graph["frontier"] != other["frontier"])


def step_plots(data: Data) -> list[StepPlot]:
    """Returns one for each graph whose step was predicted."""
    return [
        StepPlot(
            caption=f"{graph['graph']}: memory over a step, by what it is for",
            x_name="segment, in the order of running",
            measured=_measured(data),
            layers=_layers(graph),
            beginnings=_beginnings(graph),
        )
        for graph in foreseen(data)
    ]


def frontier_plot(data: Data) -> FrontierPlot | None:
    """Returns the peak of a step for each choice, where there are several."""
    lines = [
        Line(graph["graph"], [(peak["cost_ms"], peak["bytes"] / MIB) for peak in graph["frontier"]])
        for graph in foreseen(data)
        if len(graph["frontier"]) > 1
    ]
    if not lines:
        return None
    return FrontierPlot(
        caption="The peak of a step, as predicted for each choice that was tried",
        x_name="ms that this costs in a step, estimated",
        measured=_measured(data),
        lines=lines,
    )


def _layers(graph: Data) -> dict[str, list[float]]:
    stages = graph["stages"]
    return {name: [stage["amounts"][name] / MIB for stage in stages] for name in stages[0]["amounts"]}


def _beginnings(graph: Data) -> list[Mark]:
    phases = [stage["phase"] for stage in graph["stages"]]
    return [Mark(phase, phases.index(phase), across=True) for phase in dict.fromkeys(phases) if phases.index(phase)]


def _measured(data: Data) -> list[Mark]:
    """Returns the measured peak: what was in use, and the resident set where that is more."""
    found = data.get("measured_peak")
    if not found:
        return []
    resident = Mark("measured, resident", (found["held"] + found["bytes"]) / MIB)
    if found["in_use"] is None:
        return [resident]
    used = Mark("measured, in use", (found["held"] + found["in_use"]) / MIB)
    return [used, resident] if resident.value > APART * used.value else [used]
