"""Comparison of the activation statistics of two runs, tensor by tensor. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ort_accel.errors import OrtAccelError

Row = dict[str, Any]
TensorKey = tuple[int, str, str, int, int]
"""The step, direction, module, tensor and call."""

_FIGURES = ("mean", "std", "norm2", "norm1", "min", "max", "pattern")
"""The numbers of a row that are compared."""
_ROUNDING_SHARE = 1e-6
"""The share of the largest values of a step and direction below which values count as rounding."""


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor of one run and the same tensor of the other run."""

    step: int
    direction: str
    module: str
    kind: str
    tensor: int
    call: int
    amount: float
    """The largest difference of a statistic, as a share of the size of the values; infinite if not comparable."""
    what: str
    """The statistic that differs most, and its two values."""
    sizes: tuple[float | None, float | None] = (None, None)
    """The root mean square of the values in each run; None if a run lacks the tensor."""


def compare(first: Path, second: Path) -> list[Difference]:
    """Returns the differences between two folders of statistics, in the order of the run."""
    rows, others = _read(first), _read(second)
    sizes = _sizes([*rows.values(), *others.values()])
    return [_difference(key, rows.get(key), others.get(key), sizes) for key in _merged(rows, others)]


def first_divergence(differences: Iterable[Difference], tolerance: float) -> Difference | None:
    """Returns the first difference above the tolerance, in the order of the run."""
    return next((item for item in differences if item.amount > tolerance), None)


def _merged(rows: dict[TensorKey, Row], others: dict[TensorKey, Row]) -> list[TensorKey]:
    """Returns the keys of both runs by step, the forward first, and otherwise in the order of the first run."""
    keys = dict.fromkeys([*rows, *others])
    return sorted(keys, key=lambda key: (key[0], key[1] != "forward"))


def _read(folder: Path) -> dict[TensorKey, Row]:
    files = sorted(folder.glob("rank-0/step-*.jsonl")) or sorted(folder.glob("step-*.jsonl"))
    if not files:
        raise OrtAccelError(
            f"{folder} holds no activation statistics (rank-0/step-*.jsonl); "
            "observe.activation_statistics and StatisticsSubscriber write such folders"
        )
    rows = {key: row for file in files for key, row in _rows_of(file)}
    if not rows:
        raise OrtAccelError(f"{folder}: its files of activation statistics are empty")
    return rows


def _rows_of(file: Path) -> Iterator[tuple[TensorKey, Row]]:
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            key = row["step"], row["direction"], row["module"], row["tensor"], row["call"]
            for name in _FIGURES:
                float(row[name] or 0.0)  # the smallest of no finite values is null
            _root_mean_square(row)
        except (ValueError, KeyError, TypeError) as error:
            raise OrtAccelError(f"{file}:{number} is no line of activation statistics: {error!r}") from error
        yield key, row


def _sizes(rows: Iterable[Row]) -> dict[tuple[int, str], float]:
    """Returns the largest root mean square of each step and direction."""
    sizes: dict[tuple[int, str], float] = {}
    for row in rows:
        key = row["step"], row["direction"]
        sizes[key] = max(sizes.get(key, 0.0), _root_mean_square(row))
    return sizes


def _root_mean_square(row: Row) -> float:
    return float(row["norm2"]) / math.sqrt(max(_finite_count(row), 1))


def _finite_count(row: Row) -> int:
    return math.prod(row["shape"]) - int(row["nan"]) - int(row["inf"])


def _difference(key: TensorKey, row: Row | None, other: Row | None, sizes: dict[tuple[int, str], float]) -> Difference:
    present = row or other
    assert present is not None
    step, direction, module, tensor, call = key
    amount, what = _compared(row, other, sizes[step, direction] * _ROUNDING_SHARE)
    both = (None if row is None else _root_mean_square(row), None if other is None else _root_mean_square(other))
    return Difference(step, direction, module, present["kind"], tensor, call, amount, what, both)


def _compared(row: Row | None, other: Row | None, floor: float) -> tuple[float, str]:
    if row is None or other is None:
        present = row or other
        if (
            present
            and present["direction"] == "backward"
            and not (present["norm1"] or present["nan"] or present["inf"])
        ):
            return 0.0, "zeros, and no gradient"
        return math.inf, f"only in the {'second' if row is None else 'first'} run"
    for name in ("shape", "nan", "inf"):
        if row[name] != other[name]:
            return math.inf, f"{name} {row[name]} and {other[name]}"
    count = _finite_count(row)
    if not count:
        return 0.0, ""
    size = max(_root_mean_square(row), _root_mean_square(other), floor)
    extreme = max(size, *(abs(item[name]) for item in (row, other) for name in ("min", "max")))
    units = {
        "mean": size,
        "std": size,
        "norm2": size * math.sqrt(count),
        "norm1": size * count,
        "min": extreme,
        "max": extreme,
        "pattern": size * math.sqrt(count),
    }
    assert tuple(units) == _FIGURES
    amounts = {name: abs(row[name] - other[name]) / unit if unit else 0.0 for name, unit in units.items()}
    worst = max(amounts, key=lambda name: amounts[name])
    return amounts[worst], f"{worst} {row[worst]:.6g} and {other[worst]:.6g}"
