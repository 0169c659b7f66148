"""The frame of a plot: positions of values, and the numbers at its axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ort_accel.observe.page import Markup, tag

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 46
_TICKS = 6
"""The approximate number of ticks of an axis."""


def short(value: float) -> str:
    """Returns a number with three significant digits, and k, M, G or T where it is large."""
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.3g}{name}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class Axis:
    """The values from `low` to `high` on a stretch of pixels."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False
    whole: bool = False
    """True if its ticks are whole numbers."""

    def position(self, value: float) -> float:
        """Returns the position of a value in pixels; values outside of the axis are at its edge."""
        share = (self._scaled(value) - self._scaled(self.low)) / (self._scaled(self.high) - self._scaled(self.low))
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 2)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.logarithmic else value

    def ticks(self) -> list[float]:
        """Returns round numbers along the axis."""
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, max(1, (last - first) // _TICKS))]
        step = _round_step((self.high - self.low) / _TICKS)
        if self.whole:
            step = max(step, 1.0)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def vertical_axis(values: Iterable[float], logarithmic: bool) -> Axis:
    """Returns the vertical axis for these values. It begins at zero, a logarithmic one at a power of ten."""
    found = [value for value in values if math.isfinite(value)]
    if logarithmic:
        positive = [value for value in found if value > 0] or [1.0]
        low, high = (10.0 ** rounded(math.log10(end)) for rounded, end in _ends(positive))
        return Axis(low, high if high > low else 10 * low, HEIGHT - BOTTOM, TOP, logarithmic=True)
    low, high = min([0.0, *found]), max([0.0, *found])
    return Axis(low, high + (high - low) * 0.05 if high > low else low + 1.0, HEIGHT - BOTTOM, TOP)


def _ends(values: Sequence[float]) -> tuple[tuple[Callable[[float], int], float], tuple[Callable[[float], int], float]]:
    return (math.floor, min(values)), (math.ceil, max(values))


def horizontal_axis(values: Sequence[float], whole: bool = True) -> Axis:
    """Returns the horizontal axis from the first of these numbers to the last."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return Axis(low, high if high > low else low + 1.0, LEFT, WIDTH - RIGHT, whole=whole)


def frame(across: Axis, up: Axis, x_name: str, y_name: str) -> list[Markup]:
    """Returns the grid lines, the numbers, and the names of the axes."""
    parts = []
    for value in up.ticks():
        y = up.position(value)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", short(value), x=LEFT - 6, y=y + 4, text_anchor="end"))
    for value in across.ticks():
        parts.append(tag("text", short(value), x=across.position(value), y=HEIGHT - BOTTOM + 18, text_anchor="middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f"rotate(-90 14 {middle})"
    parts.append(tag("text", x_name, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 5, text_anchor="middle"))
    parts.append(tag("text", y_name, x=14, y=middle, text_anchor="middle", transform=turned))
    return parts
