"""Plain data with a place for every key and value, so that an error can say where."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ort_accel.errors import Problem

MAX_DEPTH = 32
MAX_NODES = 10_000
MAX_SHOWN_CHARACTERS = 60
MAX_INTEGER = 2**63 - 1

Scalar = str | int | float | bool | None
Plain = Scalar | Sequence["Plain"] | Mapping[str, "Plain"]
"""Data as YAML and JSON hold it."""

KeyPath = tuple[str | int, ...]
"""The keys and list positions that lead to a value."""


@dataclass(frozen=True)
class Position:
    """A position in a file: its name, and line and column counted from 1. All are None for data from Python."""

    source: str | None = None
    line: int | None = None
    column: int | None = None

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Returns a problem at this place."""
        return Problem(_visible(dotted(path)), _visible(message), self.source, self.line, self.column)


@dataclass(frozen=True)
class Node:
    """A value and its place."""

    value: Scalar | tuple[Node, ...] | dict[str, Entry]
    position: Position


@dataclass(frozen=True)
class Entry:
    """One `key: value` of a map, with the place of the key."""

    key: Position
    node: Node


def dotted(path: KeyPath) -> str:
    """Returns `memory.plans[1]` for `("memory", "plans", 1)`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" for part in path)
    return text.removeprefix(".")


def shortened(text: str) -> str:
    """Returns the text, or its beginning where it is too long for a message."""
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."


def _visible(text: str) -> str:
    """Returns the text on one line, without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(node: Node) -> Plain:
    """Returns the data without places."""
    if isinstance(node.value, dict):
        return {key: plain(entry.node) for key, entry in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(item) for item in node.value]
    return node.value


def child(node: Node, part: str | int) -> Node | None:
    """Returns the value under a key or at a list position, or None."""
    if isinstance(node.value, dict):
        entry = node.value.get(str(part))
        return entry.node if entry else None
    if isinstance(node.value, tuple) and isinstance(part, int) and part < len(node.value):
        return node.value[part]
    return None


def position_of(node: Node, path: KeyPath, *, key: bool = False) -> Position:
    """Returns the place of the value at `path` (or of its key); of the innermost section above it if it is absent."""
    for depth, part in enumerate(path):
        below = child(node, part)
        if below is None:
            break
        if key and depth == len(path) - 1 and isinstance(node.value, dict):
            return node.value[str(part)].key
        node = below
    return node.position


def value_at(node: Node, path: KeyPath) -> Node | None:
    """Returns the value at `path`, or None where there is no such value."""
    found: Node | None = node
    for part in path:
        found = child(found, part) if found else None
    return found


def without(node: Node, path: KeyPath) -> Node:
    """Returns the tree without the value at `path`; a list goes as a whole."""
    if not path or not isinstance(node.value, dict) or path[0] not in node.value:
        return node
    key = str(path[0])
    entries = dict(node.value)
    if len(path) == 1 or isinstance(entries[key].node.value, tuple):
        del entries[key]
    else:
        entries[key] = replace(entries[key], node=without(entries[key].node, path[1:]))
    return replace(node, value=entries)


def merge(base: Node, over: Node) -> Node:
    """Lay `over` on `base`: maps are joined key by key, everything else is replaced."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    entries = dict(base.value)
    for key, entry in over.value.items():
        below = entries.get(key)
        entries[key] = replace(entry, node=merge(below.node, entry.node)) if below else entry
    return Node(entries, over.position)


class UnsupportedDataError(Exception):
    """A value from Python that a configuration cannot hold."""

    def __init__(self, path: KeyPath, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


def from_data(data: object, path: KeyPath = ()) -> Node:
    """Returns a tree without places from Python data; raises `UnsupportedDataError` for values beyond YAML."""
    if len(path) > MAX_DEPTH:
        raise UnsupportedDataError(path[:3], f"nested more than {MAX_DEPTH} deep")
    if isinstance(data, Mapping):
        for key in data:
            if not isinstance(key, str):
                raise UnsupportedDataError(path, f"the key {key!r} is not text")
        return Node(
            {str(key): Entry(Position(), from_data(value, (*path, key))) for key, value in data.items()}, Position()
        )
    if isinstance(data, list | tuple):
        return Node(tuple(from_data(item, (*path, index)) for index, item in enumerate(data)), Position())
    return Node(_scalar(data, path), Position())


def _scalar(data: object, path: KeyPath) -> Scalar:
    if data is None or isinstance(data, bool):
        return data
    if isinstance(data, int):
        if abs(data) > MAX_INTEGER:
            raise UnsupportedDataError(path, f"the number is too large; the largest is {MAX_INTEGER}")
        return int(data)
    if isinstance(data, float):
        return float(data)
    text = os.fspath(data) if isinstance(data, os.PathLike) else data
    if not isinstance(text, str):
        raise UnsupportedDataError(
            path, f"a {type(data).__name__} is not allowed; use plain data: maps, lists, text, numbers, booleans"
        )
    if has_surrogate(text):
        raise UnsupportedDataError(path, "the text holds half of a character pair")
    return str.__str__(text)


def has_surrogate(text: str) -> bool:
    """True if a text holds a lone surrogate, which no file can hold."""
    return any("\ud800" <= character <= "\udfff" for character in text)
