"""The plots of memory as a PNG, for papers and slides. It needs matplotlib, which the extra `report` installs."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from ort_accel.errors import OrtAccelError
from ort_accel.observe.charts import group_of
from ort_accel.observe.memory_plots import Data, FrontierPlot, Plot, StepPlot, frontier_plot, step_plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 9.0, 4.2, 150


def memory_png(data: Data) -> bytes:
    """Returns one picture: the step of each graph by purpose, and the frontier if there is one."""
    steps, frontier = step_plots(data), frontier_plot(data)
    if not steps:
        raise OrtAccelError(
            "there is no predicted step to draw; set memory.budget or observe.memory_stats: true, and train a step"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OrtAccelError(f"a .png needs matplotlib ({error}); `pip install matplotlib`, or write .html") from error
    rows = len(steps) + (frontier is not None)
    picture = Figure((WIDTH_INCHES, HEIGHT_INCHES * rows), layout="constrained")
    plots = picture.subplots(rows, squeeze=False)[:, 0]
    for axes, step in zip(plots, steps, strict=False):
        _draw_step(axes, step)
    if frontier is not None:
        _draw_frontier(plots[-1], frontier)
    written = BytesIO()
    picture.savefig(written, format="png", dpi=DOTS_PER_INCH)
    return written.getvalue()


def _draw_step(axes: Axes, plot: StepPlot) -> None:
    groups = [group_of(name) for name in plot.layers]
    colours = [f"C{list(dict.fromkeys(groups)).index(group)}" for group in groups]
    keys = [group if group not in groups[:index] else "_" for index, group in enumerate(groups)]
    amounts = list(plot.layers.values())
    axes.stackplot(range(len(amounts[0])), *amounts, labels=keys, colors=colours, edgecolor="white")
    for mark in plot.beginnings:
        axes.axvline(mark.value, color="black", linestyle=":", linewidth=1)
        axes.annotate(mark.name, (mark.value, 0), (-4, 6), textcoords="offset points", rotation=90, ha="right")
    _finish(axes, plot)


def _draw_frontier(axes: Axes, plot: FrontierPlot) -> None:
    for line in plot.lines:
        axes.plot(*zip(*line.points, strict=True), marker="o", label=line.name)
    _finish(axes, plot)


def _finish(axes: Axes, plot: Plot) -> None:
    for mark, style in zip(plot.levels, ("--", "-.", ":"), strict=False):
        axes.axhline(mark.value, color="black", linestyle=style, linewidth=1, label=mark.name)
    axes.set(title=plot.caption, xlabel=plot.x_name, ylabel=plot.y_name, ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
