"""The data of the plots of memory, for any renderer: a step by purpose, and the frontier of choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ort_accel.observe.charts import Line, Mark

Data = Mapping[str, Any]
"""The plain data of `Report.to_dict`."""

MIB = 2**20
APART_RATIO = 1.05
"""The ratio of two measured figures beyond which both are shown."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """The parts that all plots have."""

    caption: str
    x_name: str
    levels: list[Mark]
    """The budget, and the measured peak."""
    y_name: str = "MiB"


@dataclass(frozen=True, kw_only=True)
class StepPlot(Plot):
    """Memory over the step of a graph, by purpose."""

    layers: Mapping[str, list[float]]
    """MiB in each segment."""
    beginnings: list[Mark]
    """The beginnings of the backward and of the optimizer's step."""


@dataclass(frozen=True, kw_only=True)
class FrontierPlot(Plot):
    """The cost and the peak of each choice of values to recompute or to offload."""

    lines: list[Line]


def predicted_graphs(data: Data) -> list[Data]:
    """Returns the graphs whose step was predicted; of equal ones the last."""
    graphs = [graph for graph in data.get("memory", ()) if graph["stages"]]
    return [graph for index, graph in enumerate(graphs) if all(_differ(graph, other) for other in graphs[index + 1 :])]


def _differ(graph: Data, other: Data) -> bool:
    return bool(graph["stages"] != other["stages"] or graph["frontier"] != other["frontier"])


def step_plots(data: Data) -> list[StepPlot]:
    """Returns a plot for each graph whose step was predicted."""
    return [
        StepPlot(
            caption=f"{graph['graph']}: memory over a step, by what it is for",
            x_name="segment, in the order of running",
            levels=_levels(data, [graph]),
            layers=_layers(graph),
            beginnings=_beginnings(graph),
        )
        for graph in predicted_graphs(data)
    ]


def frontier_plot(data: Data) -> FrontierPlot | None:
    """Returns the plot of peaks by choice; None if no graph has several choices."""
    graphs = [graph for graph in predicted_graphs(data) if len(graph["frontier"]) > 1]
    if not graphs:
        return None
    return FrontierPlot(
        caption="The peak of a step, as predicted for each choice that was tried",
        x_name="ms that this costs in a step, estimated",
        levels=_levels(data, graphs),
        lines=[
            Line(graph["graph"], [(peak["cost_ms"], peak["bytes"] / MIB) for peak in graph["frontier"]])
            for graph in graphs
        ],
    )


def _layers(graph: Data) -> dict[str, list[float]]:
    stages = graph["stages"]
    return {name: [stage["amounts"][name] / MIB for stage in stages] for name in stages[0]["amounts"]}


def _beginnings(graph: Data) -> list[Mark]:
    phases = [stage["phase"] for stage in graph["stages"]]
    return [Mark(phase, phases.index(phase), across=True) for phase in dict.fromkeys(phases) if phases.index(phase)]


def _levels(data: Data, graphs: list[Data]) -> list[Mark]:
    budgets = dict.fromkeys(graph.get("budget", 0) for graph in graphs)
    return [Mark("budget", budget / MIB) for budget in budgets if budget] + _measured(data)


def _measured(data: Data) -> list[Mark]:
    """Returns marks of the measured peak: the memory in use, and the resident set if it is larger."""
    found = data.get("measured_peak")
    if not found:
        return []
    resident = Mark("measured, resident", (found["held"] + found["bytes"]) / MIB)
    if found["in_use"] is None:
        return [resident]
    used = Mark("measured, in use", (found["held"] + found["in_use"]) / MIB)
    return [used, resident] if resident.value > APART_RATIO * used.value else [used]
