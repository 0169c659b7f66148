"""Reads `KEY=VALUE` lines, as `.env` files and shell scripts hold them, without running a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ort_accel.errors import ConfigError, Problem

_ASSIGNMENT = re.compile(r"""([A-Za-z_]\w*)=((?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')*)(?=\s|$)""", re.ASCII)
_SPACE = re.compile(r"\s*")
_EXPANDED_BY_SHELLS = re.compile(r"[$`]")


@dataclass(frozen=True)
class Variable:
    """One variable, and the place where it was set."""

    name: str
    value: str
    source: str = "environment"
    line: int | None = None
    column: int | None = None

    def problem(self, message: str) -> Problem:
        """Returns a problem with the variable."""
        return Problem(self.name, message, self.source, self.line, self.column)


def from_environment(environ: Mapping[str, str]) -> list[Variable]:
    """Returns the variables of a process."""
    return [Variable(name, value) for name, value in environ.items()]


def read_env_file(file: Path) -> list[Variable]:
    """Returns the variables that a file sets; the last setting of a name counts. A bad line is a `ConfigError`."""
    try:
        text = file.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error.strerror or error}", str(file))]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", "is no text in UTF-8; lines of KEY=VALUE are expected", str(file))]) from error
    variables: dict[str, Variable] = {}
    problems = []
    for number, line in enumerate(text.split("\n"), start=1):
        for found in _read_line(line.rstrip(), str(file), number):
            if isinstance(found, Problem):
                problems.append(found)
            else:
                variables[found.name] = found
    if problems:
        raise ConfigError(problems)
    return list(variables.values())


def _read_line(line: str, source: str, number: int) -> Iterator[Variable | Problem]:
    start = re.match(r"\s*(export\s+)?", line)
    position = start.end() if start else 0
    while position < len(line) and line[position] != "#":
        match = _ASSIGNMENT.match(line, position)
        if match is None:
            message = "is not KEY=VALUE; quote a value that holds spaces, and close each quote"
            yield Problem("", f"{line[position:][:60]!r} {message}", source, number, position + 1)
            return
        name, raw = match.groups()
        yield _variable(name, raw, source, number, position + 1)
        position = match.end() + len(_SPACE.match(line, match.end())[0])  # type: ignore[index]


def _variable(name: str, raw: str, source: str, line: int, column: int) -> Variable | Problem:
    if name.startswith("ORTMODULE_") and _EXPANDED_BY_SHELLS.search(re.sub(r"'[^']*'|\\.", "", raw)):
        message = (
            f"{raw!r} needs a shell to expand it; write the value out, or put it in single quotes to keep it as it is"
        )
        return Problem(name, message, source, line, column)
    return Variable(name, "".join(shlex.split(raw)), source, line, column)
