"""Plots as inline SVG, each with named axes, a key, and a text for screen readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ort_accel.observe.axes import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    frame,
    horizontal_axis,
    vertical_axis,
)
from ort_accel.observe.page import COLOURS, Markup, joined, tag

_DASHES = (None, "6 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2")
"""Dash patterns, so that lines differ in more than colour."""


@dataclass(frozen=True)
class Line:
    """A named line. `band` has the lowest and highest value of each point that stands for several steps."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Mark:
    """A named value on the vertical axis, or with `across` on the horizontal one."""

    name: str
    value: float
    across: bool = False


def line_chart(
    caption: str,
    lines: Sequence[Line],
    x_name: str,
    y_name: str,
    *,
    logarithmic: bool = False,
    marks: Iterable[Mark] = (),
    highest: float | None = None,
    whole: bool = True,
) -> Markup:
    """Returns lines over a common horizontal axis, with whole ticks if `whole`. `highest` extends the vertical axis."""
    marks = list(marks)
    values = [value for line in lines for _, value in line.points]
    values += [end for line in lines for ends in line.band for end in ends]
    values += [mark.value for mark in marks if not mark.across] + ([] if highest is None else [highest])
    across = horizontal_axis([x for line in lines for x, _ in line.points], whole)
    up = vertical_axis(values, logarithmic)
    parts = [*frame(across, up, x_name, y_name)]
    for number, line in enumerate(lines):
        parts += _line_shapes(line, number, across, up)
    for mark in marks:
        parts += _mark_shapes(mark, across, up)
    return figure(caption, parts, [line.name for line in lines])


def stacked_chart(
    caption: str,
    places: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    x_name: str,
    y_name: str,
    marks: Iterable[Mark] = (),
) -> Markup:
    """Returns a chart of stacked amounts; the layers of a group have one colour and one entry in the key."""
    marks = list(marks)
    totals = [sum(column) for column in zip(*layers.values(), strict=True)]
    across = horizontal_axis(places)
    up = vertical_axis([*totals, *(mark.value for mark in marks if not mark.across)], logarithmic=False)
    groups = list(dict.fromkeys(map(group_of, layers)))
    parts = [*frame(across, up, x_name, y_name)]
    below = [0.0] * len(places)
    for name, amounts in layers.items():
        above = [under + amount for under, amount in zip(below, amounts, strict=True)]
        edge = [*zip(places, above, strict=True), *reversed(list(zip(places, below, strict=True)))]
        outline = " ".join(f"{across.position(x)},{up.position(y)}" for x, y in edge)
        shape = {"points": outline, "fill": _colour(groups.index(group_of(name))), "class_": "layer"}
        parts.append(tag("polygon", tag("title", name), **shape))
        below = above
    for mark in marks:
        parts += _mark_shapes(mark, across, up)
    return figure(caption, parts, groups, filled=True)


def group_of(layer: str) -> str:
    """Returns the group of a layer that is named `group: part`."""
    return layer.partition(": ")[0]


def bar_chart(caption: str, bars: Iterable[tuple[str, Mapping[str, float], str]], names: Sequence[str] = ()) -> Markup:
    """Returns a list with a bar for each row, of one amount or of several, with a text at its end."""
    rows = list(bars)
    longest = max((sum(parts.values()) for _, parts, _ in rows), default=0.0) or 1.0
    items = (
        tag("li", tag("span", label, class_="label"), track(parts, longest), tag("span", text, class_="value"))
        for label, parts, text in rows
    )
    return tag("figure", _head(caption, names, filled=True), tag("ul", items, class_="bars", aria_label=caption))


def track(parts: Mapping[str, float], longest: float) -> Markup:
    """Returns a bar; its text stands beside it, so that screen readers skip it."""
    shapes = (
        tag("i", style=f"width:{100 * amount / longest:.2f}%;background:{_colour(number)}", title=name or None)
        for number, (name, amount) in enumerate(parts.items())
    )
    return tag("span", shapes, class_="track", aria_hidden="true")


def figure(caption: str, parts: Sequence[Markup], names: Sequence[str] = (), filled: bool = False) -> Markup:
    """Returns a plot with its caption and, for several series, its key."""
    plot = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=caption, class_="plot")
    return tag("figure", _head(caption, names, filled), plot)


def _head(caption: str, names: Sequence[str], filled: bool) -> Markup:
    keys = (_key(name, number, filled) for number, name in enumerate(names)) if len(names) > 1 else ()
    return joined(tag("figcaption", caption), tag("div", keys) if keys else "")


def _colour(number: int) -> str:
    return f"var(--c{number % COLOURS})"


def _line_shapes(line: Line, number: int, across: Axis, up: Axis) -> list[Markup]:
    points = [(across.position(x), up.position(value)) for x, value in line.points if math.isfinite(value)]
    parts = []
    if line.band:
        places = [across.position(x) for x, _ in line.points]
        edges = [(x, up.position(high)) for x, (_, high) in zip(places, line.band, strict=True)]
        edges += reversed([(x, up.position(low)) for x, (low, _) in zip(places, line.band, strict=True)])
        parts.append(tag("polygon", points=_path(edges), fill=_colour(number), class_="band"))
    shape = {"stroke": _colour(number), "stroke_dasharray": _DASHES[number % len(_DASHES)], "class_": "series"}
    parts.append(tag("polyline", tag("title", line.name), points=_path(points), **shape))
    if len(points) == 1:
        parts.append(tag("circle", cx=points[0][0], cy=points[0][1], r=3, fill=_colour(number)))
    return parts


def _path(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _mark_shapes(mark: Mark, across: Axis, up: Axis) -> list[Markup]:
    if mark.across:
        x = across.position(mark.value)
        side = "end" if x > WIDTH / 2 else "start"
        name = tag(
            "text",
            mark.name,
            x=x - 5 if side == "end" else x + 5,
            y=HEIGHT - BOTTOM - 6,
            text_anchor=side,
            class_="mark-name",
        )
        return [tag("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="mark"), name]
    y = up.position(mark.value)
    name = tag("text", mark.name, x=WIDTH - RIGHT, y=y - 5, text_anchor="end", class_="mark-name")
    return [tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="mark"), name]


def _key(name: str, number: int, filled: bool) -> Markup:
    colour, dashes = _colour(number), _DASHES[number % len(_DASHES)]
    if filled:
        sample = tag("rect", width=16, height=8, y=2, x=6, fill=colour)
    else:
        sample = tag("line", x1=0, x2=28, y1=6, y2=6, stroke=colour, stroke_width=3, stroke_dasharray=dashes)
    return tag("span", tag("svg", sample, viewBox="0 0 28 12", aria_hidden="true"), joined(name), class_="key")
