"""What `make test` leaves to `make test-all`: more of what other tests check, where each takes many seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_long(values: Iterable[Any], *kept: Any) -> list[Any]:
    """These values, or tuples of them, as parameters of a test, of which `make test` takes some."""
    values = list(values)
    assert all(value in values for value in kept), f"{kept} are not all among {values}"
    return [value if value in kept else _long(*value) if isinstance(value, tuple) else _long(value) for value in values]


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)
