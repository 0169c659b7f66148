"""Metadata of the fields of a section: combinations of values that are errors, and rows of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ort_accel.reporting.report import Feature, State


@dataclass(frozen=True)
class Constraint:
    """A check of a key's value beside the values of other keys. Each of the values is allowed by itself."""

    check: Callable[..., str | None]
    """Takes the key's value, then those of `reads`; returns the problem and the way out, or None."""
    reads: tuple[str, ...] = ()
    """The full names of the other keys."""


def conflict(when: Callable[..., object], text: str, *reads: str) -> Constraint:
    """Returns the constraint that `when` must be false. `{0}` in the text is the key's value, `{1}` the first read."""
    return Constraint(lambda *values: text.format(*values) if when(*values) else None, reads)


def cuda_only(wanted: object, way_out: str) -> Constraint:
    """Returns the constraint that excludes one value of a key beside the provider cpu."""
    text = f"works on cuda only, and engine.provider is cpu; {way_out}, or name the provider cuda"
    return conflict(lambda value, provider: value == wanted and provider == "cpu", text, "engine.provider")


@dataclass(frozen=True)
class Row:
    """A key's row in the report's feature table, until the code that obeys the key records what it did."""

    asked: str
    """The text where the value asks for something. `{0}` in it is the value, `{1}` that of the first of `reads`."""
    state: State = State.APPLIED
    """The state where the value asks for something."""
    off: str = "not asked for"
    """The reason where the value is false, null or empty."""
    reads: tuple[str, ...] = ()
    """The full names of other keys that the text shows."""


@dataclass(frozen=True)
class NoRow:
    """The mark of a key that has no row of its own in the report's feature table."""


NO_ROW = NoRow()


@dataclass(frozen=True)
class Rule:
    """A constraint with the full names of all keys that it reads, the constrained key first."""

    keys: tuple[str, ...]
    check: Callable[..., str | None]


def declared(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields the full name and the declaration of every key below a section, sections included."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        below = section_of(field)
        if below is not None:
            yield from declared(below, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the section that a field holds, or may hold; None for a field that holds a value."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def rules(config: type[BaseModel]) -> Iterator[Rule]:
    """Yields the constraints of all keys, in the order of their declaration."""
    for key, field in declared(config):
        for constraint in field.metadata:
            if isinstance(constraint, Constraint):
                yield Rule((key, *constraint.reads), constraint.check)


def broken(config: BaseModel) -> Iterator[tuple[Rule, str]]:
    """Yields every rule that a configuration breaks, with the problem and the way out."""
    for rule in rules(type(config)):
        if message := rule.check(*(_value(config, key) for key in rule.keys)):
            yield rule, message


def rows(config: BaseModel) -> Iterator[Feature]:
    """Yields the declared rows of a configuration."""
    for key, field in declared(type(config)):
        for row in field.metadata:
            if isinstance(row, Row):
                yield _feature(key, row, config)


def _feature(key: str, row: Row, config: BaseModel) -> Feature:
    value = _value(config, key)
    if not value:
        return Feature(key, State.OFF, reason=row.off)
    text = row.asked.format(*(_shown(_value(config, name)) for name in (key, *row.reads)))
    return Feature(key, row.state, effect=text) if row.state is State.APPLIED else Feature(key, row.state, reason=text)


def _value(config: BaseModel, key: str) -> object:
    """Returns the value of a key; None where an optional section above it is absent."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
