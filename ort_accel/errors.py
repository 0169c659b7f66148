"""Every error that a user of ort_accel can meet, under one root."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class OrtAccelError(Exception):
    """The root of all errors raised on purpose. Its text names the failure, the value seen, and a way out."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    return (str(error).splitlines() or [""])[0]


def in_a_line(error: BaseException) -> str:
    """Returns the type of an error, and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration, and where it is."""

    path: str
    """The dotted path of the key, empty for the file as a whole."""
    message: str
    """The mistake, the allowed values, and a similar one."""
    source: str | None = None
    """The file's name, `<stdin>`, or None for a configuration built in Python."""
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = [self.source or "config", *(str(number) for number in (self.line, self.column) if number is not None)]
        return ": ".join(part for part in (":".join(place), self.path, self.message) if part)


class ConfigError(OrtAccelError):
    """A configuration that cannot be used, with every problem found in it, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class RuntimeMissingError(OrtAccelError, ImportError):
    """No onnxruntime is installed, or more than one, so that nothing can be run."""


class OptimizerError(OrtAccelError, ValueError):
    """An optimizer was given an option or a parameter that it cannot work with."""
