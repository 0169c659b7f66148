"""The text of a report on memory: values saved for the backward, and the plan table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ort_accel.observe.text_tables import text_table
from ort_accel.reporting.memory import GraphMemory, MeasuredPeak, Peak, PlanKind, PlanRow
from ort_accel.reporting.report import Report

KINDS = {
    PlanKind.RECOMPUTE: "recompute",
    PlanKind.COMPROMISE: "keep a smaller copy",
    PlanKind.OFFLOAD: "offload",
}


def mib(count: float) -> str:
    """Returns bytes as MiB."""
    return f"{count / 2**20:,.1f}"


def render_memory(report: Report) -> RenderableType | None:
    """Returns the memory part of a report; None where no graph has a backward yet."""
    graphs = list(report.memory.values())
    if not graphs:
        return None
    parts: list[RenderableType] = []
    for graph in graphs:
        parts += [_summary(graph), plan_table(graph.plans), _clusters(graph.plans)]
        if graph.symbols:
            parts.append(Text("sizes: " + ", ".join(f"{name} = {size}" for name, size in graph.symbols.items())))
    if report.measured_peak is not None:
        parts.append(Text(measured(report.measured_peak)))
    return Group(*parts)


def measured(peak: MeasuredPeak) -> str:
    """Returns the measured peak of a step, in a line."""
    whole = f"{mib(peak.held + peak.bytes)} MiB: {mib(peak.held)} before it, and {mib(peak.bytes)} of its own"
    used = "" if peak.in_use is None else f"; {mib(peak.in_use)} of its own were in use at most, without what was freed"
    return f"measured peak of step {peak.step}: {whole} (resident set of the process{used})"


def predicted(peak: Peak) -> str:
    """Returns the predicted peak of a step, in a line."""
    return f"{mib(peak.bytes)} MiB: {mib(peak.resident)} before it, and {mib(peak.bytes - peak.resident)} of its own"


def plan_table(rows: Sequence[PlanRow]) -> Table:
    """Returns the table with one row a plan, the largest saving first."""
    table = text_table(("Plan", "", "config", "Freq", "Saving(B)", "Cost(ms)", "Saving Symbolic"))
    for number, row in enumerate(rows, 1):
        state = "ON" if row.applied else "OFF"
        count = row.applied if 0 < row.applied < row.frequency else -1
        config = f"{row.cluster}:{row.kind}:{count}" if row.kind != PlanKind.OFFLOAD else f"{row.cluster} offload"
        cells = (str(row.frequency), f"{row.saving:,}", f"{row.cost_ms:.2f}", row.symbolic)
        table.add_row(f"Plan {number}", state, Text(config), *cells)
    return table


def _summary(graph: GraphMemory) -> Table:
    facts = Table.grid(padding=(0, 2))
    kept = f"{mib(graph.stash)} MiB, without recomputation {mib(graph.stash_without)} MiB"
    facts.add_row("memory of", f"{graph.graph}, level {graph.level}, {graph.layers} layers found")
    facts.add_row("kept for the backward", kept)
    facts.add_row("computed again", f"{graph.repeated} operators, about {graph.cost_ms:.1f} ms a step")
    if graph.moved:
        facts.add_row("moved to host memory", f"{mib(graph.moved)} MiB, about {graph.moving_ms:.1f} ms a step")
    if graph.masks:
        facts.add_row("masks kept as bits", f"{mib(graph.bits)} MiB instead of {mib(graph.masks)} MiB")
    if graph.frontier:
        facts.add_row("predicted peak of a step", predicted(graph.frontier[-1]))
    if len(graph.frontier) > 1:
        facts.add_row("without recomputation", predicted(graph.frontier[0]))
    return facts


def _clusters(rows: Sequence[PlanRow]) -> Table:
    """Returns the table of clusters: each with its option, the places requested and applied, and its saving."""
    table = text_table(("cluster", "option", "requested", "applied", "share of saving", "saves in one place"))
    whole = sum(row.saving for row in rows) or 1
    for row in rows:
        asked = "all" if row.requested == -1 else str(row.requested)
        share = f"{100 * row.saving / whole:.1f} %"
        done = f"{row.applied} of {row.frequency}"
        table.add_row(Text(row.cluster), KINDS[row.kind], asked, done, share, Text(", ".join(row.shapes)))
    return table
