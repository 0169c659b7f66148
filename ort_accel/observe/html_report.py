"""A report as one HTML page. Each section is a function of the report's plain data; empty ones are left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from ort_accel.observe.answers import MAX_HINTS, answers, beside_eager, typical
from ort_accel.observe.axes import short
from ort_accel.observe.charts import Line, bar_chart, line_chart, stacked_chart
from ort_accel.observe.density_table import HEADINGS, NUMBERS, balancing, cells, scheme_rows
from ort_accel.observe.feature_table import KINDS, NO_FALLBACKS, WORDS, grouped
from ort_accel.observe.headline import percent
from ort_accel.observe.hints import hints
from ort_accel.observe.memory_plots import Data
from ort_accel.observe.memory_section import memory_section
from ort_accel.observe.page import (
    COLOURS,
    Content,
    Markup,
    folded,
    fragment,
    joined,
    page,
    plots,
    sections,
    table,
    tag,
)
from ort_accel.reporting.batches import BatchingScheme, InputDensity, Inspection
from ort_accel.reporting.fallbacks import Fallback, Fallbacks, Reason
from ort_accel.reporting.report import Report, State
from ort_accel.reporting.segments import Runner

_RUNNERS = {Runner.ORT.value: "ONNX Runtime", Runner.PYTORCH.value: "PyTorch", Runner.INDUCTOR.value: "Inductor"}
_SERIES = {
    "step_time": ("Seconds of each step", "seconds"),
    "tokens_per_s": ("Tokens a second that are not padding", "tokens a second"),
    "density": ("Share of the tokens that are not padding", "share"),
    "label_density": ("Share of the labels that are not ignored", "share"),
    "flops_per_s": ("Floating point operations a second that compiled graphs computed", "FLOP/s"),
    "mfu": ("The same as a share of the speed of a large matrix product", "share"),
    "peak_memory": ("The most memory that the process has held so far", "MiB"),
}
"""The caption and the unit of each figure over the steps."""
_SIDES = {"ort": "ort_accel", "eager": "eager PyTorch"}
"""The first parts of the names of series. A script may add those of the same training in eager PyTorch."""
_BESIDE = {
    "step_time": ("a typical step", "s"),
    "tokens_per_s": ("tokens a second", ""),
    "memory_growth": ("peak memory of the training", "MiB"),
}
_MAX_ROWS = 40
_LOGARITHMIC_RATIO = 20
"""The ratio of a figure's highest to its lowest value beyond which the axis is logarithmic."""


def html_report(data: Data) -> str:
    """Returns the page as one file without references to others."""
    version = data["versions"].get("ort_accel", "")
    return page(f"ort_accel {version}: report".replace("  ", " "), _subtitle(data), answers(data), _sections(data))


def notebook_report(report: Report) -> str:
    """Returns a report for a notebook: the answers, and the sections folded."""
    data = report.to_dict()
    parts = (folded(title, tag("section", content)) for title, content in _contents(data))
    return fragment(answers(data), parts)


def notebook_fallbacks(items: Sequence[Fallback]) -> str:
    """Returns a list of fallbacks for a notebook."""
    return fragment(_fallback_tables(items) if items else tag("p", NO_FALLBACKS))


def _contents(data: Data) -> list[tuple[str, Markup]]:
    return [(title, content) for title, make in SECTIONS if (content := make(data))]


def _sections(data: Data) -> Markup:
    return sections(_contents(data))


def _subtitle(data: Data) -> str:
    said = "Numbers were measured or derived in this run"
    elsewhere = any(item["reason"] == Reason.SLOWER_ELSEWHERE.value for item in data["fallbacks"])
    return f"{said}, but for those beside “{Reason.SLOWER_ELSEWHERE}”." if elsewhere else f"{said}."


def _hints(data: Data) -> Markup | None:
    found = hints(data)
    if len(found) <= MAX_HINTS:
        return None
    return table(("key", "because"), [(tag("code", hint.yaml), hint.text) for hint in found])


def _features(data: Data) -> Markup:
    rows = {state: [item for item in data["features"] if item["state"] == state.value] for state in State}
    headings = ("feature", "", "why, or what it does")

    def listed(state: State) -> Markup:
        word = tag("span", WORDS[state], class_=state.value)
        return table(headings, [(item["name"], word, item["effect"] or item["reason"]) for item in rows[state]])

    parts = [listed(state) for state in (State.APPLIED, State.REFUSED) if rows[state]]
    if rows[State.OFF]:
        parts.append(folded(f"{len(rows[State.OFF])} that are off", listed(State.OFF)))
    return joined(parts)


def _runners(data: Data) -> Markup:
    segments = data["segments"]
    if not segments:
        return tag("p", "Nothing was compiled yet: the model was not called since it was accelerated.")
    parts = plots(
        _runner_chart("Nodes", segments, "nodes"),
        _runner_chart("FLOPs of matrix products and convolutions, estimated", segments, "flops"),
    )
    rows = [
        (
            item["graph"],
            _RUNNERS[item["runner"]],
            f"{item['nodes']:,}",
            short(item["flops"]),
            _ops(item["ops"]),
        )
        for item in segments
    ]
    listing = table(("graph", "run by", "nodes", "FLOPs", "operators"), rows, numbers=(2, 3))
    return joined(parts, folded(f"{len(segments)} segments, in the order of running", listing))


def _runner_chart(caption: str, segments: Sequence[Data], amount: str) -> Markup:
    bars = []
    for kind in KINDS:
        part = [item for item in segments if item["graph"].startswith(kind)]
        by_runner = {
            name: sum(item[amount] for item in part if item["runner"] == runner) for runner, name in _RUNNERS.items()
        }
        if part:
            whole = sum(by_runner.values())
            shares = {name: value / (whole or 1) for name, value in by_runner.items()}
            bars.append((kind, shares, f"{percent(by_runner['ONNX Runtime'], whole)} of {short(whole)}"))
    return bar_chart(caption, bars, list(_RUNNERS.values()))


def _ops(ops: Mapping[str, int]) -> str:
    return ", ".join(f"{op} x{count}" if count > 1 else op for op, count in ops.items())


def _fallbacks(data: Data) -> Markup:
    items = [Fallback(**item | {"reason": Reason(item["reason"])}) for item in data["fallbacks"]]
    found = [item for item in items if item.reason is not Reason.GRAPH_BREAK]
    is_all = data["segments"] and not any(item.is_forced for item in found)
    said = tag("p", "There is nothing that ONNX Runtime cannot run.") if is_all else ""
    return joined(said, _fallback_tables(found))


def _fallback_tables(items: Sequence[Fallback]) -> Markup:
    """Returns the tables of what ONNX Runtime cannot run, of choices, and of what sessions call."""
    titles = "What ONNX Runtime cannot run", "By choice", "Called from ONNX Runtime's sessions"
    titled = zip(titles, grouped(items), strict=True)
    return joined(joined(tag("h3", title), _fallback_table(part)) for title, part in titled if part)


def _fallback_table(items: Sequence[Fallback]) -> Markup:
    def rows(part: Sequence[Fallback]) -> list[tuple[str, ...]]:
        return [(f"{item.count:,}", item.op, item.reason.value, item.detail, item.where) for item in part]

    headings = ("nodes", "operator", "reason", "detail", "line of the model")
    shown = table(headings, rows(items[:_MAX_ROWS]), numbers=(0,))
    rest = items[_MAX_ROWS:]
    return joined(shown, folded(f"{len(rest)} more kinds", table(headings, rows(rest), numbers=(0,))) if rest else "")


def _graph_breaks(data: Data) -> Markup | None:
    breaks = [item for item in data["fallbacks"] if item["reason"] == Reason.GRAPH_BREAK.value]
    if not breaks:
        return None
    said = (
        "Python code between graphs, which nobody could capture. Each divides a graph, and what it does is not sped up."
    )
    rows = [(f"{item['count']:,}", item["detail"] or item["op"], item["where"]) for item in breaks]
    return joined(tag("p", said), table(("times", "what Dynamo met", "line of the model"), rows, numbers=(0,)))


def _start_up(data: Data) -> Markup | None:
    timings = data["timings"]
    if not timings:
        return None
    slowest_first = sorted(timings.items(), key=lambda item: -item[1])
    caption = f"Seconds by phase, {sum(timings.values()):.2f} in all; a phase inside of another counts for itself only"
    return bar_chart(caption, [(phase, {"": seconds}, f"{seconds:.2f} s") for phase, seconds in slowest_first])


def _steps(data: Data) -> Markup | None:
    series = data["series"]
    charts = (_over_steps(name, series) for name in _SERIES if any(f"{side}/{name}" in series for side in _SIDES))
    others = (_over_steps(name, series) for name in series if name.partition("/")[2] not in {*_SERIES, *_BESIDE})
    beside = joined(_beside(data))
    parts = [*([tag("div", beside)] if beside else []), *charts, *others]
    return plots(parts) if parts else None


def _beside(data: Data) -> Iterator[Markup]:
    """Yields a chart for each figure that is known of both sides."""
    for name, (words, unit) in _BESIDE.items():
        values = {label: typical(data, f"{side}/{name}") for side, label in _SIDES.items()}
        if name == "step_time" and not all(values.values()) and (found := beside_eager(data)):
            words = "forward and backward, in compared steps"
            values = dict(zip(values, (found.ours, found.eager), strict=True))
        if all(values.values()):
            form = "{:,.0f}" if max(values.values()) >= 100 else "{:.3g}"
            bars = [(label, {"": value}, f"{form.format(value)} {unit}".strip()) for label, value in values.items()]
            yield bar_chart(f"ort_accel beside eager PyTorch: {words}", bars)


def _over_steps(name: str, series: Mapping[str, Sequence[Data]]) -> Markup:
    """Returns a figure's chart. Its axis is logarithmic if the first steps, which compile, are far above the rest."""
    caption, unit = _SERIES.get(name, (name, ""))
    sides = {label: series[f"{side}/{name}"] for side, label in _SIDES.items() if f"{side}/{name}" in series}
    sides = sides or {name: series[name]}
    each = max(point["count"] for points in sides.values() for point in points)
    if each > 1:
        caption += f" (the mean of {each} steps, within their extremes)"
    lowest = min(point["low"] for points in sides.values() for point in points)
    highest = max(point["high"] for points in sides.values() for point in points)
    return line_chart(
        caption,
        [_line(label, points, has_band=each > 1) for label, points in sides.items()],
        "step",
        unit,
        logarithmic=lowest > 0 and highest / lowest > _LOGARITHMIC_RATIO,
        highest=1.0 if unit == "share" else None,
    )


def _line(name: str, points: Sequence[Data], has_band: bool) -> Line:
    band = [(point["low"], point["high"]) for point in points] if has_band else ()
    return Line(name, [(point["step"], point["mean"]) for point in points], band)


def _density(data: Data) -> Markup | None:
    if not data["inspection"]:
        return None
    found = _inspection(data["inspection"])
    parts: list[Content] = []
    if found.ways:
        caption = f"FLOPs a batch, estimated, of the last {found.batches} batches, and made into batches in other ways"
        bars = [
            (name, {"": way.flops}, f"{amount}, {share}")
            for way, (name, amount, share) in zip(found.ways, scheme_rows(found), strict=True)
        ]
        parts = [joined(bar_chart(caption, bars), tag("p", balancing(found)))]
    tokens = [row for row in found.rows if row.kind == "EMBED"]
    if len({row.step for row in tokens}) > 1:
        parts.insert(0, _tokens_chart([row for row in tokens if row.name == tokens[0].name]))
    listing = table(HEADINGS, map(cells, found.rows), NUMBERS)
    return joined(plots(*parts), folded("The density table, as it was last", listing))


def _tokens_chart(rows: Sequence[InputDensity]) -> Markup:
    layers = {"valid": [row.valid for row in rows], "padding": [row.total - row.valid for row in rows]}
    caption = f"Tokens of {rows[0].name} in the batches of the last density table"
    return stacked_chart(caption, [row.step for row in rows], layers, "batch", "tokens")


def _inspection(data: Data) -> Inspection:
    rows, schemes = [InputDensity(**row) for row in data["rows"]], [BatchingScheme(**way) for way in data["ways"]]
    return Inspection(**{**data, "rows": rows, "ways": schemes})


def _tuning(data: Data) -> Markup | None:
    """Returns the table of timings, the largest total first."""
    races = sorted(data.get("races", ()), key=lambda item: -item["count"] * max(item["seconds"].values()))
    rows = [
        (
            f"{item['count']:,}",
            f"{item['graph']}: {item['subject']}",
            ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in item["seconds"].items()),
            item["chosen"],
        )
        for item in races
    ]
    return table(("nodes", "measured", "ms", "chosen"), rows, numbers=(0,)) if rows else None


def _load_balance(data: Data) -> Markup | None:
    found = data["load_balance"]
    if not found or not found["after"]:
        return None
    highest = max(load for side in ("before", "after") for step in found[side] for load in step)
    kept = f"; one step of {found['every']} is shown" if found["every"] > 1 else ""

    def plot(side: str, words: str) -> Markup:
        steps, waiting = found[side], found[f"waiting_{side}"]
        lines = _loads(steps, [number * found["every"] for number in range(len(steps))])
        caption = f"{words}: processes wait {waiting:.1%} of the time for the one with the most work{kept}"
        return line_chart(caption, lines, "step of the epoch", "tokens", highest=highest)

    return plots(plot("before", "Without balancing"), plot("after", "With balancing"))


def _loads(steps: Sequence[Sequence[float]], places: Sequence[int]) -> list[Line]:
    """Returns a line for each process, or their mean and extremes if there are more processes than colours."""
    if len(steps[0]) > COLOURS:
        means = [(place, sum(loads) / len(loads)) for place, loads in zip(places, steps, strict=True)]
        return [Line("mean", means, [(min(loads), max(loads)) for loads in steps])]
    by_process = enumerate(zip(*steps, strict=True))
    return [Line(f"process {rank}", list(zip(places, loads, strict=True))) for rank, loads in by_process]


def _notes(data: Data) -> Markup | None:
    counted = table(("counted", ""), [(name, f"{count:,}") for name, count in data["counters"].items()], numbers=(1,))
    notes = tag("ul", (tag("li", note) for note in data["notes"]))
    return joined(notes if data["notes"] else "", counted if data["counters"] else "") or None


def _basis(data: Data) -> Markup:
    versions = table(("", "version"), data["versions"].items())
    config = table(("key", "value"), sorted(_leaves(data["config"])))
    return joined(versions, folded("The configuration, every key of it", config) if data["config"] else "")


def _leaves(tree: Data, path: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{path}{key}.")
        else:
            found.append((f"{path}{key}", value if isinstance(value, str) else json.dumps(value)))
    return found


SECTIONS: tuple[tuple[str, Callable[[Data], Markup | None]], ...] = (
    ("Hints", _hints),
    ("Steps", _steps),
    ("Memory", memory_section),
    ("Density", _density),
    ("Load balancing", _load_balance),
    ("Who runs what", _runners),
    ("What PyTorch runs", _fallbacks),
    ("Graph breaks", _graph_breaks),
    ("Tuning", _tuning),
    ("Set-up", _start_up),
    ("Features", _features),
    ("Notes and counts", _notes),
    ("Versions and configuration", _basis),
)
"""The sections in their order. A new one is a function and a line here."""

Report.as_html = staticmethod(notebook_report)
Fallbacks.as_html = staticmethod(notebook_fallbacks)
