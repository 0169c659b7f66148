"""What `make test` leaves to `make test-all`: more of what other tests check, where each takes many seconds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, product
from typing import Any

import pytest


def mostly_long(values: Iterable[Any], *kept: Any) -> list[Any]:
    """These values, or tuples of them, as parameters of a test, of which `make test` takes some."""
    values = list(values)
    assert all(value in values for value in kept), f"{kept} are not all among {values}"
    return [value if value in kept else _long(*value) if isinstance(value, tuple) else _long(value) for value in values]


def all_pairs(firsts: Iterable[Any], seconds: Iterable[Any]) -> list[Any]:
    """Every first value with every second one, of which `make test` takes each first value with one second one."""
    firsts, seconds = list(firsts), list(seconds)
    return mostly_long(product(firsts, seconds), *zip(firsts, cycle(seconds), strict=False))


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)
