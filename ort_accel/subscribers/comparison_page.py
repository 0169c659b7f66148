"""The HTML page that compares two runs module by module, with plots. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ort_accel.observe.charts import Line, Mark, line_chart
from ort_accel.observe.page import Content, Markup, figures, folded, page, plots, sections, table, tag
from ort_accel.subscribers.comparison import Difference, first_divergence

_DIRECTIONS = ("forward", "backward")
_MAX_ROWS = 500


def verdict(differences: Sequence[Difference], tolerance: float) -> str:
    """Returns a sentence that tells where two runs diverge, or that they agree."""
    diverged = first_divergence(differences, tolerance)
    if diverged is None:
        return f"{len(differences)} tensors agree within {tolerance:g}"
    module = diverged.module or "the model itself"
    return f"first divergence: step {diverged.step}, {diverged.direction}, {module} ({diverged.kind}): {diverged.what}"


def comparison_page(names: tuple[str, str], differences: Sequence[Difference], tolerance: float) -> str:
    """Returns the page as one self-contained HTML text."""
    diverged = first_divergence(differences, tolerance)
    above = [item for item in differences if item.amount > tolerance]
    shown = [
        ("tensors compared", f"{len(differences):,}"),
        ("of them differ by more", f"{len(above):,}"),
        ("is called rounding, of the size of the values", f"{tolerance:g}"),
        ("steps", f"{len({item.step for item in differences}):,}"),
    ]
    step = diverged.step if diverged else min((item.step for item in differences), default=0)
    in_step = [item for item in differences if item.step == step]
    parts: list[tuple[str, Content]] = [
        (f"Step {step}, in the order of running", plots(_step_plots(in_step, names, diverged, tolerance))),
        ("Step by step", [_steps_plot(differences, tolerance)]),
        ("Module by module", [_modules(differences, tolerance)]),
    ]
    if above:
        parts.append(("What differs", [_listing(above)]))
    return page(
        "Two runs, module by module",
        f"{names[0]} and {names[1]}",
        tag("p", verdict(differences, tolerance), class_="refused" if diverged else "applied"),
        figures(shown),
        sections(parts),
    )


def _step_plots(
    differences: Sequence[Difference], names: tuple[str, str], diverged: Difference | None, tolerance: float
) -> list[Markup]:
    marks = [Mark(f"rounding, {tolerance:g}", tolerance)]
    if diverged is not None:
        marks.append(Mark(diverged.module or "the model itself", differences.index(diverged), across=True))
    numbered = list(enumerate(differences))
    amounts = [
        Line(direction, _finite((number, item.amount) for number, item in numbered if item.direction == direction))
        for direction in _DIRECTIONS
    ]
    sizes = [
        Line(name, [(number, size) for number, item in numbered if (size := item.sizes[run]) is not None])
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
    """Returns the points of a plot, with infinite values (not comparable) above all others."""
    found = list(points)
    top = 10 * max((value for _, value in found if math.isfinite(value)), default=1.0)
    return [(x, value if math.isfinite(value) else max(top, 1.0)) for x, value in found]


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
    """The largest difference of a module in each direction."""

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
            cells += ["", ""] if worst is None else [_amount_cell(worst, tolerance), str(worst.step)]
        largest = max(module.worst.values(), key=lambda item: item.amount)
        rows.append([*cells, largest.what])
    headings = ("module", "kind", "forward", "at step", "backward", "at step", "what differs most")
    return table(headings, rows, numbers=(2, 3, 4, 5))


def _amount_cell(item: Difference, tolerance: float) -> Markup:
    return tag("span", f"{item.amount:.2g}", class_="apart" if item.amount > tolerance else None)


def _listing(above: Sequence[Difference]) -> Markup:
    rows = [
        (str(item.step), item.direction, item.module or "(model)", str(item.call), f"{item.amount:.2g}", item.what)
        for item in above[:_MAX_ROWS]
    ]
    headings = ("step", "direction", "module", "call", "difference", "what differs most")
    count = f"{len(above):,}" if len(rows) == len(above) else f"The first {len(rows):,} of {len(above):,}"
    return folded(f"{count} tensors that differ, in the order of running", table(headings, rows, numbers=(0, 3, 4)))
