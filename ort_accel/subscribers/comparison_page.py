"""Two runs lined up module by module, as an HTML page with plots. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ort_accel.observe.charts import Line, Mark, line_chart
from ort_accel.observe.page import Content, Markup, figures, folded, page, table, tag
from ort_accel.subscribers.comparison import Difference, first_divergence

_DIRECTIONS = ("forward", "backward")
_LONGEST_LIST = 500


def verdict(differences: Sequence[Difference], tolerance: float) -> str:
    """Where two runs part, or that they agree."""
    parted = first_divergence(differences, tolerance)
    if parted is None:
        return f"{len(differences)} tensors agree within {tolerance:g}"
    module = parted.module or "the model itself"
    return f"first divergence: step {parted.step}, {parted.direction}, {module} ({parted.kind}): {parted.what}"


def comparison_page(names: tuple[str, str], differences: Sequence[Difference], tolerance: float) -> str:
    """The page. It holds everything it needs, and can be sent or kept as one file."""
    parted = first_divergence(differences, tolerance)
    apart = [item for item in differences if item.amount > tolerance]
    shown = [
        ("tensors compared", f"{len(differences):,}"),
        ("of them differ by more", f"{len(apart):,}"),
        ("is called rounding, of the size of the values", f"{tolerance:g}"),
        ("steps", f"{len({item.step for item in differences}):,}"),
    ]
    step = parted.step if parted else min((item.step for item in differences), default=0)
    in_step = [item for item in differences if item.step == step]
    sections: list[tuple[str, Sequence[Content]]] = [
        (f"Step {step}, in the order of running", _step_plots(in_step, names, parted, tolerance)),
        ("Step by step", [_steps_plot(differences, tolerance)]),
        ("Module by module", [_modules(differences, tolerance)]),
    ]
    if apart:
        sections.append(("What differs", [_listing(apart)]))
    return page(
        "Two runs, module by module",
        f"{names[0]} and {names[1]}",
        tag("p", verdict(differences, tolerance), class_="refused" if parted else "applied"),
        figures(shown),
        [tag("section", tag("h2", title), *content) for title, content in sections],
    )


def _step_plots(
    differences: Sequence[Difference], names: tuple[str, str], parted: Difference | None, tolerance: float
) -> list[Markup]:
    marks = [Mark(f"rounding, {tolerance:g}", tolerance)]
    if parted is not None:
        marks.append(Mark(parted.module or "the model itself", differences.index(parted), across=True))
    places = list(enumerate(differences))
    amounts = [
        Line(direction, _finite((place, item.amount) for place, item in places if item.direction == direction))
        for direction in _DIRECTIONS
    ]
    sizes = [
        Line(name, [(place, size) for place, item in places if (size := item.sizes[run]) is not None])
        for run, name in enumerate(names)
    ]
    across = "tensor, in the order of running"
    return [
        line_chart(
            "The largest difference of each tensor", amounts, across, "difference", logarithmic=True, marks=marks
        ),
        line_chart("The size of its values (root mean square) in both runs", sizes, across, "size", logarithmic=True),
    ]


def _finite(points: Iterable[tuple[int, float]]) -> list[tuple[float, float]]:
    """Points of a plot; what is infinite, since it cannot be compared, stands above all others."""
    found = list(points)
    top = 10 * max((value for _, value in found if math.isfinite(value)), default=1.0)
    return [(place, value if math.isfinite(value) else max(top, 1.0)) for place, value in found]


def _steps_plot(differences: Sequence[Difference], tolerance: float) -> Markup:
    lines = []
    for direction in _DIRECTIONS:
        worst: dict[int, float] = {}
        for item in differences:
            if item.direction == direction:
                worst[item.step] = max(worst.get(item.step, 0.0), item.amount)
        lines.append(Line(direction, _finite(worst.items())))
    marks = [Mark(f"rounding, {tolerance:g}", tolerance)]
    return line_chart("The largest difference of each step", lines, "step", "difference", logarithmic=True, marks=marks)


@dataclass
class _Module:
    """What is worst about one module."""

    kind: str
    worst: dict[str, Difference]


def _modules(differences: Sequence[Difference], tolerance: float) -> Markup:
    found: dict[str, _Module] = {}
    for item in differences:
        module = found.setdefault(item.module, _Module(item.kind, {}))
        present = module.worst.get(item.direction)
        if present is None or item.amount > present.amount:
            module.worst[item.direction] = item
    rows = []
    for name, module in found.items():
        cells: list[Content] = [name or "(model)", module.kind]
        for direction in _DIRECTIONS:
            worst = module.worst.get(direction)
            cells += ["", ""] if worst is None else [_amount(worst, tolerance), str(worst.step)]
        largest = max(module.worst.values(), key=lambda item: item.amount)
        rows.append([*cells, largest.what])
    headings = ("module", "kind", "forward", "at step", "backward", "at step", "what differs most")
    return table(headings, rows, numbers=(2, 3, 4, 5))


def _amount(item: Difference, tolerance: float) -> Markup:
    return tag("span", f"{item.amount:.2g}", class_="apart" if item.amount > tolerance else None)


def _listing(apart: Sequence[Difference]) -> Markup:
    rows = [
        (str(item.step), item.direction, item.module or "(model)", str(item.call), f"{item.amount:.2g}", item.what)
        for item in apart[:_LONGEST_LIST]
    ]
    headings = ("step", "direction", "module", "call", "difference", "what differs most")
    count = f"{len(apart):,}" if len(rows) == len(apart) else f"The first {len(rows):,} of {len(apart):,}"
    return folded(f"{count} tensors that differ, in the order of running", table(headings, rows, numbers=(0, 3, 4)))
