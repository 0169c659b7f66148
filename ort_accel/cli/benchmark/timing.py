"""Times of several contenders taken in turns, and statistics of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles

RESAMPLES = 2000


@dataclass(frozen=True)
class Times:
    """Seconds of one contender's steps."""

    median: float
    min: float
    lower_quartile: float
    upper_quartile: float
    all: list[float]

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Ratio:
    """The factor by which one contender takes longer than another, and its interval from 95 of 100 resamplings."""

    ratio: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """As plain data."""
        return asdict(self)


def in_turns(steps: Mapping[str, Callable[[], None]], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Returns the seconds of each step; every round runs each once, and begins with another."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for count in range(warmup + rounds):
        gc.collect()
        first = count % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            steps[name]()
            spent = time.perf_counter() - start
            if count >= warmup:
                seconds[name].append(spent)
    return seconds


def summary(seconds: Sequence[float]) -> Times:
    """Returns the statistics of a list of times."""
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (*seconds, *seconds, *seconds)
    return Times(median(seconds), min(seconds), low, high, list(seconds))


def compare(slow: Sequence[float], fast: Sequence[float], seed: int = 0) -> Ratio:
    """Returns the ratio of two medians. The interval resamples whole rounds, whose steps shared their disturbances."""
    generator = random.Random(seed)
    rounds = list(zip(slow, fast, strict=True))
    found = []
    for _ in range(RESAMPLES):
        drawn = generator.choices(rounds, k=len(rounds))
        found.append(median(one for one, _ in drawn) / median(other for _, other in drawn))
    found.sort()
    edge = RESAMPLES // 40
    return Ratio(median(slow) / median(fast), found[edge], found[-edge - 1])
