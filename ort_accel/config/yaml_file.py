"""Reads YAML into a tree with places. The result for any file is a tree or problems, never an exception.

The parser's events are read, rather than its finished nodes, so that depth and aliases are bounded while they grow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from ort_accel.config.scalars import ScalarError, read_scalar
from ort_accel.config.tree import MAX_DEPTH, MAX_NODES, Entry, KeyPath, Node, Position, Scalar, has_surrogate, shortened
from ort_accel.errors import Problem

MAX_BYTES = 256 * 1024

_NOT_TEXT = re.compile(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DIRECTIVE = re.compile(r"^%(?:YAML|TAG)", re.MULTILINE)
_PLAIN_MESSAGES = {
    "mapping values are not allowed": "no `:` can stand here; indent keys of a section alike, quote text with a colon",
    "could not find expected ':'": "a key without its `:` ends here; write `key: value`",
    "expected <block end>": "this fits no section above; indent keys of one section alike",
}
"""The parser's messages for the commonest mistakes, and plainer ones."""

_LINE_BREAK = re.compile(r"\r\n|\r|\n")

Reading = tuple[Node | None, list[Problem]]
"""The tree, or None where the text is no YAML, and the problems."""


def read_file(file: Path, name: str, apart_from: Collection[str] = ()) -> tuple[bytes | None, str]:
    """Returns the bytes of a file, or None and the reason why there are none. Reads little more than is allowed.

    In the place of a missing file, none of `apart_from` is suggested.
    """
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_BYTES + 1), ""
    except FileNotFoundError:
        return None, f"no such file{_similar_file(file, apart_from)}"
    except IsADirectoryError:
        return None, "this is a folder; name a YAML file in it"
    except (OSError, ValueError) as error:
        return None, f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}"


def _similar_file(file: Path, apart_from: Collection[str]) -> str:
    try:
        files = [other for other in file.parent.iterdir() if other.suffix in {".yaml", ".yml"}]
        names = [other.name for other in files if os.path.realpath(other) not in apart_from]
    except OSError:
        return f"; the folder {str(file.parent)!r} is not there either"
    close = get_close_matches(file.name, names, n=1)
    return f"; did you mean {file.parent / close[0]}?" if close else ""


def parse(content: bytes | str, source: str) -> Reading:
    """Returns the tree that YAML text stands for. A key that has a problem of its own is reported and left out."""
    start = Position(source, 1, 1)
    if len(content) > MAX_BYTES:
        return None, [start.problem((), f"larger than {MAX_BYTES // 1024} KiB; this is not a configuration")]
    if isinstance(content, bytes):
        try:
            content = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            position = _position_at(error.object[: error.start].decode("utf-8", "replace"), source)
            return None, [
                position.problem((), f"byte 0x{error.object[error.start]:02x} is not UTF-8; save it as UTF-8")
            ]
    if odd := _NOT_TEXT.search(content):
        position = _position_at(content[: odd.start()], source)
        return None, [position.problem((), f"control character U+{ord(odd[0]):04X}; a configuration is plain text")]
    return _Reader(content, source).read()


def _position_at(before: str, source: str) -> Position:
    lines = _LINE_BREAK.split(before)
    return Position(source, len(lines), len(lines[-1]) + 1)


class _Mark(Protocol):
    """A position in the text, counted from 0."""

    line: int
    column: int


class _Event(Protocol):
    """An event of ruamel.yaml's parser. Events of each kind have some of these attributes."""

    start_mark: _Mark
    anchor: str
    ctag: object
    value: str
    style: str | None
    version: tuple[int, int] | None
    tags: object


class _Stop(Exception):
    """A problem that makes the rest of the text unreadable."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Reader:
    """Builds one document's tree from the parser's events."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.problems: list[Problem] = []
        self.anchors: dict[str, tuple[Node, int, int]] = {}
        self.open_anchors: set[str] = set()
        self.nodes = 0

    def read(self) -> Reading:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        yaml = YAML(typ="safe", pure=True)
        try:
            return self._document(yaml.parse(self.text)), self.problems
        except _Stop as stop:
            return None, [*self.problems, stop.problem]
        except YAMLError as error:
            return None, [*self.problems, self._syntax(error)]
        except Exception as error:  # the parser raises assertion and index errors on odd input
            return None, [*self.problems, Position(self.source, 1, 1).problem((), f"not readable as YAML: {error}")]

    def _document(self, events: Iterator[_Event]) -> Node:
        next(events)
        event = next(events)
        if type(event).__name__ == "StreamEndEvent":
            raise self._empty()
        if event.version not in (None, (1, 2)) or event.tags:
            directive = _DIRECTIVE.search(self.text)
            position = _position_at(self.text[: directive.start()], self.source) if directive else self._position(event)
            self.problems.append(position.problem((), "directives change the meaning of a file; remove this line"))
        root, _ = self._node(next(events), events, (), 1)
        next(events)
        after = next(events)
        if type(after).__name__ != "StreamEndEvent":
            raise self._stop(after, (), "a second document begins here; write one configuration per file")
        if root.value is None and not self.problems:
            raise self._empty()
        if not isinstance(root.value, dict):
            raise _Stop(
                root.position.problem(
                    (), "keys and values belong here, such as `version: 1` (with a space after the colon)"
                )
            )
        return root

    def _empty(self) -> _Stop:
        return _Stop(Position(self.source, 1, 1).problem((), "the file is empty; the smallest one is `version: 1`"))

    def _node(self, event: _Event, events: Iterator[_Event], path: KeyPath, depth: int) -> tuple[Node, int]:
        """Returns the node that begins with `event`, and its depth. An unusable node is reported and becomes null."""
        kind = type(event).__name__
        if kind == "AliasEvent":
            return self._alias(event, path, depth)
        self._count(event, path, 1, depth)
        if event.ctag is not None:
            self._report(event, path, f"the tag {shortened(str(event.ctag))} is not understood; write the plain value")
        if event.anchor is not None:
            self.open_anchors.add(event.anchor)
        before = self.nodes
        if kind == "MappingStartEvent":
            node, below = self._map(event, events, path, depth)
        elif kind == "SequenceStartEvent":
            node, below = self._list(event, events, path, depth)
        else:
            node, below = self._scalar(event, path), 0
        if event.anchor is not None:
            self.open_anchors.discard(event.anchor)
            self.anchors[event.anchor] = (node, self.nodes - before, below)
        return (node if event.ctag is None else Node(None, node.position)), below + 1

    def _alias(self, event: _Event, path: KeyPath, depth: int) -> tuple[Node, int]:
        name = shortened(event.anchor)
        if event.anchor in self.open_anchors:
            self._report(event, path, f"*{name} is used inside of itself; write the value out")
            return Node(None, self._position(event)), 1
        if event.anchor not in self.anchors:
            self._report(event, path, f"*{name} has no anchor &{name} above it")
            return Node(None, self._position(event)), 1
        node, size, below = self.anchors[event.anchor]
        self._count(event, path, size + 1, depth + below)
        return replace(node, position=self._position(event)), below + 1

    def _map(self, start: _Event, events: Iterator[_Event], path: KeyPath, depth: int) -> tuple[Node, int]:
        entries: dict[str, Entry] = {}
        deepest = 0
        while type(event := next(events)).__name__ != "MappingEndEvent":
            key = self._key(event, events, path, depth)
            node, below = self._node(next(events), events, (*path, "?" if key is None else key), depth + 1)
            deepest = max(deepest, below)
            if key is None:
                continue
            if key in entries:
                self._report(event, (*path, key), f"given twice; the first is on line {entries[key].key.line}")
                continue
            if node.value is None and node.position.line != event.start_mark.line + 1:
                node = Node(None, self._position(event))  # a key without a value
            entries[key] = Entry(self._position(event), node)
        return Node(entries, self._position(start)), deepest

    def _key(self, event: _Event, events: Iterator[_Event], path: KeyPath, depth: int) -> str | None:
        reported = len(self.problems)
        node, _ = self._node(event, events, path, depth + 1)
        if len(self.problems) > reported:
            return None
        if not isinstance(node.value, str):
            self._report(event, path, "a key must be text; put it in quotes if it is meant as text")
            return None
        if node.value == "<<" and getattr(event, "style", None) is None:
            self._report(event, path, "merge keys are not understood; write the keys out, or use `extends: other.yaml`")
            return None
        return node.value

    def _list(self, start: _Event, events: Iterator[_Event], path: KeyPath, depth: int) -> tuple[Node, int]:
        items: list[Node] = []
        deepest = 0
        while type(event := next(events)).__name__ != "SequenceEndEvent":
            node, below = self._node(event, events, (*path, len(items)), depth + 1)
            deepest = max(deepest, below)
            items.append(node)
        return Node(tuple(items), self._position(start)), deepest

    def _scalar(self, event: _Event, path: KeyPath) -> Node:
        value: Scalar = None
        if has_surrogate(event.value):
            self._report(event, path, "the text holds half of a character pair")
        elif event.style is not None or event.ctag is not None:
            value = event.value
        else:
            try:
                value = read_scalar(event.value)
            except ScalarError as error:
                self._report(event, path, str(error))
        return Node(value, self._position(event))

    def _count(self, event: _Event, path: KeyPath, nodes: int, depth: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise self._stop(event, path[:3], f"more than {MAX_NODES} values, with every alias written out")
        if depth > MAX_DEPTH:
            raise self._stop(event, path[:3], f"nested more than {MAX_DEPTH} deep")

    def _position(self, event: _Event) -> Position:
        return Position(self.source, event.start_mark.line + 1, event.start_mark.column + 1)

    def _report(self, event: _Event, path: KeyPath, message: str) -> None:
        self.problems.append(self._position(event).problem(path, message))

    def _stop(self, event: _Event, path: KeyPath, message: str) -> _Stop:
        return _Stop(self._position(event).problem(path, message))

    def _syntax(self, error: Exception) -> Problem:
        """Returns the parser's error, in a line."""
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        position = Position(self.source, mark.line + 1, mark.column + 1) if mark else Position(self.source, 1, 1)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        context = getattr(error, "context", None)
        if "'\\t'" in what:
            return position.problem((), "a tab stands here; YAML is indented with spaces only")
        plainer = next((words for start, words in _PLAIN_MESSAGES.items() if what.startswith(start)), "")
        return position.problem((), plainer or f"not readable as YAML: {what}{f' ({context})' if context else ''}")
