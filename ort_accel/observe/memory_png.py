"""The plots of memory as a picture, for papers and slides. It needs matplotlib, which `ort-accel[report]` installs."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from ort_accel.errors import OrtAccelError
from ort_accel.observe.memory_plots import (
    AGAIN,
    FRONTIER,
    PEAK,
    SEGMENT,
    STEP,
    Data,
    beginnings,
    foreseen,
    frontier,
    layers,
    measured,
)

WIDTH, HEIGHT, DOTS = 9.0, 4.2, 150
"""Inches of one plot, and dots in an inch."""


def memory_png(data: Data) -> bytes:
    """One picture: the step of each graph by what its memory is for, and the frontier where there is one."""
    graphs, lines = foreseen(data), frontier(data)
    if not graphs:
        raise OrtAccelError(
            "there is no predicted step to draw; set memory.budget or observe.memory_stats: true, and train a step"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OrtAccelError(f"a .png needs matplotlib ({error}); install ort-accel[report], or write .html") from error
    rows = len(graphs) + bool(lines)
    picture = Figure((WIDTH, HEIGHT * rows), layout="constrained")
    plots = picture.subplots(rows, squeeze=False)[:, 0]
    for plot, graph in zip(plots, graphs, strict=False):
        _step(plot, graph, data)
    if lines:
        _frontier(plots[-1], data)
    written = BytesIO()
    picture.savefig(written, format="png", dpi=DOTS)
    return written.getvalue()


def _step(plot: Any, graph: Data, data: Data) -> None:
    amounts = layers(graph)
    groups = [name.partition(": ")[0] for name in amounts]
    colours = [f"C{list(dict.fromkeys(groups)).index(group)}" for group in groups]
    keys = [group if group not in groups[:index] else None for index, group in enumerate(groups)]
    plot.stackplot(range(len(graph["stages"])), *amounts.values(), labels=keys, colors=colours, edgecolor="white")
    for mark in beginnings(graph):
        plot.axvline(mark.value, color="black", linestyle=":", linewidth=1)
        plot.annotate(mark.name, (mark.value, 0), (-4, 6), textcoords="offset points", rotation=90, ha="right")
    _finish(plot, data, title=STEP.format(graph=graph["graph"]), xlabel=SEGMENT)


def _frontier(plot: Any, data: Data) -> None:
    for line in frontier(data):
        plot.plot(*zip(*line.points, strict=True), marker="o", label=line.name)
    _finish(plot, data, title=FRONTIER, xlabel=AGAIN)


def _finish(plot: Any, data: Data, **words: str) -> None:
    for mark, style in zip(measured(data), ("--", "-."), strict=False):
        plot.axhline(mark.value, color="black", linestyle=style, linewidth=1, label=mark.name)
    plot.set(**words, ylabel=PEAK, ylim=(0, None))
    plot.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
