"""The feature table: a report as text, for a terminal or a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from shutil import get_terminal_size

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ort_accel.observe.headline import percent, work_summary
from ort_accel.observe.hints import hints
from ort_accel.observe.memory_table import render_memory
from ort_accel.observe.text_tables import plain_text, text_table
from ort_accel.reporting.fallbacks import Fallback, Fallbacks
from ort_accel.reporting.report import Feature, Report, State
from ort_accel.reporting.segments import Runner, Segment
from ort_accel.reporting.timings import Race

WORDS = {State.APPLIED: "ON", State.REFUSED: "REFUSED", State.OFF: "OFF"}
_STYLES = {State.APPLIED: "green", State.REFUSED: "yellow", State.OFF: "dim"}
KINDS = ("forward", "backward", "inference")
"""The kinds of graphs; the name of a graph begins with its kind."""
NO_FALLBACKS = "PyTorch runs no operator of the compiled graphs."
_MAX_ROWS = 10
WIDTH_CHARACTERS = 120
"""The width in characters of a table without a terminal."""


def feature_table(report: Report, everything: bool = True, width: int | None = None) -> str:
    """Returns the table as plain text, as wide as `width` or else as the terminal."""
    return plain_text(render(report, everything), width or get_terminal_size((WIDTH_CHARACTERS, 0)).columns)


def print_feature_table(report: Report, everything: bool = True, stderr: bool = False) -> None:
    """Print the table: in colour on a terminal that has any, otherwise as plain text."""
    console = Console(stderr=stderr)
    if console.is_terminal:
        console.print(render(report, everything))
    else:
        print(feature_table(report, everything), file=console.file)


def render(report: Report, everything: bool = True) -> RenderableType:
    """Returns the table for a rich console. Without `everything`, it counts features that are off, and cuts lists."""
    version = report.versions.get("ort_accel", "")
    title = Text(f"***** ort_accel {version}: {work_summary(report)} *****".replace("  ", " "), style="bold")
    parts: list[RenderableType | None] = [
        title,
        _comparison(report),
        render_kernels(report),
        _features(report.features.values(), everything),
        _shares(report.segments),
    ]
    longest = None if everything else _MAX_ROWS
    parts += _fallback_tables(report.fallbacks, longest)
    parts += [
        _races(report.races, longest),
        render_memory(report) if everything else None,
        _facts(report),
        render_hints(report),
    ]
    return Group(*(line for part in parts if part is not None for line in (part, Text())))


def _comparison(report: Report) -> Text | None:
    """Returns the comparison with eager PyTorch; None where the title has it."""
    found = report.comparison
    return Text(str(found)) if found is not None and found.is_on_engine else None


def render_kernels(report: Report) -> Table | None:
    """Returns a line for each side's kernels, with its share of the work; None where nothing was compiled."""
    if not report.segments:
        return None
    work = report.kernels
    all_nodes, all_flops = (sum(amounts) for amounts in zip(*work.values(), strict=True))
    table = text_table(("what ran where", "nodes", "", "GFLOP, estimated", ""), right=range(1, 5))
    for kernels, (nodes, flops) in work.items():
        amounts = f"{nodes:,}", percent(nodes, all_nodes), f"{flops / 1e9:,.2f}", percent(flops, all_flops)
        table.add_row(Text(kernels), *amounts)
    return table


def render_hints(report: Report) -> Table | None:
    """Returns the hints; None where there are none."""
    found = hints(report.to_dict())
    if not found:
        return None
    table = text_table(("what to try next", "key"))
    for hint in found:
        table.add_row(Text(hint.text), Text(hint.yaml, style="bold"))
    return table


def _features(features: Collection[Feature], everything: bool) -> RenderableType:
    table = text_table(("feature", "", "why, or what it does"))
    shown = [feature for feature in features if everything or feature.state is not State.OFF]
    for feature in shown:
        state = Text(WORDS[feature.state], style=_STYLES[feature.state])
        table.add_row(Text(feature.name), state, Text(feature.effect or feature.reason))
    hidden = len(features) - len(shown)
    if hidden:
        where = Text("observe.log_level: info lists them", style="dim")
        table.add_row(Text(f"{hidden} others"), Text("OFF", style="dim"), where)
    return table


def _shares(segments: Sequence[Segment]) -> RenderableType:
    if not segments:
        return Text("Nothing was compiled yet: the model was not called since it was accelerated.")
    table = text_table(
        ("run by ONNX Runtime", "nodes", "", "GFLOP, estimated", "", "graphs", "segments"),
        right=range(1, 7),
    )
    for kind in [*KINDS, ""]:
        part = [segment for segment in segments if segment.graph.startswith(kind)]
        if part:
            _add_share(table, kind or "all", part)
    return table


def _add_share(table: Table, name: str, segments: Sequence[Segment]) -> None:
    def amounts(amount: Callable[[Segment], float], unit: float, digits: int) -> tuple[str, str]:
        whole = sum(map(amount, segments))
        ours = sum(amount(segment) for segment in segments if segment.runner is Runner.ORT)
        return f"{ours / unit:,.{digits}f} of {whole / unit:,.{digits}f}", percent(ours, whole)

    graphs = {segment.graph for segment in segments}
    nodes = amounts(lambda segment: segment.nodes, 1, 0)
    work = amounts(lambda segment: segment.flops, 1e9, 3)
    table.add_row(name, *nodes, *work, str(len(graphs)), str(len(segments)))


def fallback_table(items: Sequence[Fallback]) -> str:
    """Returns fallbacks as text: those that ONNX Runtime cannot run, and those that PyTorch runs by choice."""
    found = [part for part in _fallback_tables(items, None) if part is not None]
    return plain_text(Group(*found), get_terminal_size((WIDTH_CHARACTERS, 0)).columns) if found else NO_FALLBACKS


def grouped(items: Iterable[Fallback]) -> tuple[list[Fallback], list[Fallback], list[Fallback]]:
    """Returns the fallbacks that ONNX Runtime cannot run, those by choice, and those that sessions call."""
    groups: tuple[list[Fallback], list[Fallback], list[Fallback]] = ([], [], [])
    for item in items:
        groups[0 if item.is_forced else 2 if item.is_called else 1].append(item)
    return groups


def _fallback_tables(items: Sequence[Fallback], longest: int | None) -> list[RenderableType | None]:
    forced, choices, called = grouped(items)
    return [
        _fallbacks("PyTorch runs what ONNX Runtime cannot", forced, longest),
        _fallbacks("PyTorch runs by choice", choices, longest),
        _fallbacks("ONNX Runtime's sessions call PyTorch's kernels", called, longest),
    ]


def _fallbacks(title: str, items: Sequence[Fallback], longest: int | None) -> RenderableType | None:
    if not items:
        return None
    table = text_table(("nodes", title), right=(0,))
    for item in items[:longest]:
        why = f"{item.reason}: {item.detail}" if item.detail else str(item.reason)
        where = f"; first at {item.where}" if item.where and item.is_forced else ""
        table.add_row(str(item.count), Text(f"{item.op}: {why}{where}"))
    rest = items[longest:] if longest is not None else []
    if rest:
        table.add_row(str(sum(item.count for item in rest)), Text(f"{len(rest)} more kinds", style="dim"))
    return table


def _races(items: Sequence[Race], longest: int | None) -> RenderableType | None:
    """Returns the table of timings, the largest total first."""
    if not items:
        return None
    table = text_table(("nodes", "measured", "ms", "chosen"), right=(0,))
    ordered = sorted(items, key=lambda item: item.count * max(item.seconds.values()), reverse=True)
    for item in ordered[:longest]:
        times = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in item.seconds.items())
        table.add_row(str(item.count), Text(f"{item.graph}: {item.subject}"), Text(times), Text(item.chosen))
    rest = len(ordered[longest:]) if longest is not None else 0
    if rest:
        table.add_row("", Text(f"{rest} more kinds", style="dim"), "", "")
    return table


def _facts(report: Report) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    if report.timings:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in report.timings.items())
        facts.add_row("set-up", Text(f"{sum(report.timings.values()):.2f} s: {phases}"))
    if report.counters:
        facts.add_row("counted", Text(", ".join(f"{name} {count}" for name, count in report.counters.items())))
    if report.versions:
        facts.add_row("versions", Text(", ".join(f"{name} {version}" for name, version in report.versions.items())))
    for note in report.notes:
        facts.add_row("note", Text(note))
    return facts


Report.as_table = staticmethod(feature_table)
Fallbacks.as_table = staticmethod(fallback_table)
