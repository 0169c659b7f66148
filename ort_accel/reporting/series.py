"""Figures over the steps of a training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A figure of one step, or of several consecutive steps."""

    step: int
    """The first step."""
    count: int
    """The number of steps."""
    mean: float
    low: float
    high: float


class Series:
    """A figure over the steps of a training. In a long series each point stands for several steps."""

    MAX_POINTS = 512
    """The most points that are kept. Beyond it, neighbours are joined."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._steps_per_point = 1

    def add(self, step: int, value: float) -> None:
        """Add the figure of the next step."""
        point = Point(step, 1, value, value, value)
        if self.points and self.points[-1].count < self._steps_per_point:
            point = _joined(self.points.pop(), point)
        self.points.append(point)
        if len(self.points) > self.MAX_POINTS:
            self._steps_per_point *= 2
            halves = self.points[::2], self.points[1::2]
            last = self.points[-1:] if len(self.points) % 2 else []
            self.points = [_joined(one, other) for one, other in zip(*halves, strict=False)] + last


def _joined(one: Point, other: Point) -> Point:
    count = one.count + other.count
    mean = (one.mean * one.count + other.mean * other.count) / count
    return Point(one.step, count, mean, min(one.low, other.low), max(one.high, other.high))
