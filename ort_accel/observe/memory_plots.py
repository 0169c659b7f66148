"""What the plots of memory show, apart from how they are drawn: a step by what its memory is for, and the frontier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ort_accel.observe.charts import Line, Mark

Data = Mapping[str, Any]
"""What `Report.to_dict` gives."""

MIB = 2**20
APART = 1.05
"""Two measured figures are shown both where one is so many times the other."""

STEP = "{graph}: memory over a step, by what it is for"
FRONTIER = "The peak of a step, as predicted for each choice that was tried"
SEGMENT, AGAIN, PEAK = "segment, in the order of running", "ms computed again in a step, estimated", "MiB"


def foreseen(data: Data) -> list[Data]:
    """The graphs whose step was predicted; of those that take the same the last one."""
    graphs = [graph for graph in data.get("memory", ()) if graph["stages"]]
    return [graph for index, graph in enumerate(graphs) if all(_differ(graph, other) for other in graphs[index + 1 :])]


def _differ(graph: Data, other: Data) -> bool:
    return bool(graph["stages"] != other["stages"] or graph["frontier"] != other["frontier"])


def layers(graph: Data) -> dict[str, list[float]]:
    """MiB in each segment, by what they are for."""
    stages = graph["stages"]
    return {name: [stage["amounts"][name] / MIB for stage in stages] for name in stages[0]["amounts"]}


def beginnings(graph: Data) -> Iterator[Mark]:
    """Where the backward and the optimizer's step begin."""
    phases = [stage["phase"] for stage in graph["stages"]]
    return (Mark(phase, phases.index(phase), across=True) for phase in dict.fromkeys(phases) if phases.index(phase))


def measured(data: Data) -> list[Mark]:
    """The measured peak: what was in use, and the resident set where that is more."""
    found = data.get("measured_peak")
    if not found:
        return []
    resident = Mark("measured, resident", (found["held"] + found["bytes"]) / MIB)
    if found["in_use"] is None:
        return [resident]
    used = Mark("measured, in use", (found["held"] + found["in_use"]) / MIB)
    return [used, resident] if resident.value > APART * used.value else [used]


def frontier(data: Data) -> list[Line]:
    """What each choice costs in a step, and the peak that it leads to."""
    return [
        Line(graph["graph"], [(peak["cost_ms"], peak["bytes"] / MIB) for peak in graph["frontier"]])
        for graph in foreseen(data)
        if len(graph["frontier"]) > 1
    ]
