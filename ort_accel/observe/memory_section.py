"""The section of the report's page on memory: values saved for the backward, the step, the frontier, the plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ort_accel.observe.charts import bar_chart, line_chart, stacked_chart
from ort_accel.observe.feature_table import WORDS
from ort_accel.observe.memory_plots import MIB, Data, frontier_plot, predicted_graphs, step_plots
from ort_accel.observe.page import Content, Markup, folded, joined, plots, table, tag
from ort_accel.reporting.report import State


def memory_section(data: Data) -> Markup | None:
    """Returns the section; None where no graph has a backward."""
    graphs = data.get("memory", ())
    if not graphs:
        return None
    bars = [
        (f"{item['graph']}, {words}", {"": item[key] / MIB}, f"{item[key] / MIB:,.1f} MiB")
        for item in graphs
        for key, words in (("stash_without", "without recomputation"), ("stash", "as it is"))
    ]
    kept = bar_chart("What the forward keeps for the backward", bars)
    return joined(plots(_steps(data), _frontier(data), _peaks(data), kept), map(_recomputed, graphs))


def _steps(data: Data) -> Iterator[Markup]:
    for plot in step_plots(data):
        places, marks = range(len(next(iter(plot.layers.values())))), [*plot.beginnings, *plot.levels]
        yield stacked_chart(plot.caption, places, plot.layers, plot.x_name, plot.y_name, marks)


def _frontier(data: Data) -> Content:
    plot = frontier_plot(data)
    if plot is None:
        return ""
    return line_chart(plot.caption, plot.lines, plot.x_name, plot.y_name, marks=plot.levels, whole=False)


def _peaks(data: Data) -> Content:
    """Returns the chart of a step's peaks: predicted without and with recomputation, and measured."""
    bars = []
    for item in predicted_graphs(data):
        for peak in item["frontier"][:1] + item["frontier"][1:][-1:]:
            label = f"{item['graph']}, {peak['cost_ms']:.1f} ms a step"
            bars.append(_bar(label, peak["resident"], peak["bytes"] - peak["resident"]))
    found = data.get("measured_peak")
    if found:
        for key, words in (("in_use", "in use"), ("bytes", "resident")):
            if found[key] is not None:
                bars.append(_bar(f"measured in step {found['step']}, {words}", found["held"], found[key]))
    return bar_chart("The peak of a step, as predicted and as measured", bars) if bars else ""


def _bar(label: str, before: int, own: int) -> tuple[str, Mapping[str, float], str]:
    parts = {"there before": before / MIB, "of the step": own / MIB}
    return label, parts, f"{sum(parts.values()):,.1f} MiB"


def _recomputed(item: Data) -> Markup:
    """Returns the recomputation of one pair of graphs, and all its plans."""
    plans = item["plans"]
    sizes = ", ".join(f"{name} = {size}" for name, size in item["symbols"].items())
    said = f"{item['repeated']} operators are computed again, which takes about {item['cost_ms']:.1f} ms a step."
    if item["moved"]:
        said += f" {item['moved'] / MIB:,.1f} MiB go to host memory and back, about {item['moving_ms']:.1f} ms."
    if item["masks"]:
        said += f" Of masks {item['bits'] / MIB:,.1f} MiB of bits are kept instead of {item['masks'] / MIB:,.1f} MiB."
    listing = table(
        ("", "cluster", "type", "applied", "saving, bytes", "cost, ms", "saving, symbolic"), map(_plan, plans), (4, 5)
    )
    return joined(
        tag("h3", f"{item['graph']}, level {item['level']}, {item['layers']} layers found"),
        tag("p", said, f" Sizes: {sizes}." if sizes else ""),
        folded(f"{len(plans)} plans, the largest saving first", listing) if plans else "",
    )


def _plan(row: Data) -> tuple[Content, ...]:
    state = State.APPLIED if row["applied"] else State.OFF
    word = tag("span", WORDS[state], class_=state.value)
    places = f"{row['applied']} of {row['frequency']}"
    cost = f"{row['cost_ms']:.2f}"
    return word, row["cluster"], str(row["kind"]), places, f"{row['saving']:,}", cost, row["symbolic"]
