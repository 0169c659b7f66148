"""Writes plain data as YAML that reads back as the same data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ort_accel.config.scalars import write_scalar
from ort_accel.config.tree import Plain

_MAX_SIMPLE_KEY_CHARACTERS = 500
"""A reader gives up on `key: value` when the key is very long; `? key` has no such limit."""


def to_yaml(data: Mapping[str, Plain]) -> str:
    """Returns the data with one key a line, maps indented, lists in brackets."""
    return "".join(f"{line}\n" for line in _lines(data)) or "{}\n"


def flow(value: Plain) -> str:
    """Returns a value on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{write_scalar(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(flow, value)) + "]"
    return write_scalar(value)


def _lines(data: Mapping[str, Plain]) -> Iterator[str]:
    for key, value in data.items():
        text = write_scalar(key)
        start = f"{text}:"
        if len(text) > _MAX_SIMPLE_KEY_CHARACTERS:
            yield f"? {text}"
            start = ":"
        if isinstance(value, Mapping) and value:
            yield start
            yield from (f"  {line}" for line in _lines(value))
        else:
            yield f"{start} {flow(value)}"
