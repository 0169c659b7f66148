"""Types of values beyond plain strings, numbers and booleans."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from ort_accel.config.plan_text import PlanError, join_plans, parse_plans
from ort_accel.config.tree import shortened

Switch = Literal["auto"] | bool
"""`auto`: ort_accel decides and the report says which and why; `true` and `false` are obeyed."""


def _check_path(value: object) -> object:
    if isinstance(value, str | Path) and (not str(value) or "\0" in str(value)):
        raise PydanticCustomError(
            "refused", "an empty path, or one with a NUL in it, names nothing; write null for none"
        )
    return value


FilePath = Annotated[Path, Field(strict=False), BeforeValidator(_check_path)]
"""A path; a relative one is taken from the folder that the program runs in."""


def _check_exact(value: object) -> object:
    if isinstance(value, bool | float):
        raise PydanticCustomError("exact", "the booleans and fractions that Python calls equal to a number are not it")
    return value


EXACT = BeforeValidator(_check_exact)
"""The check of a choice between numbers, where Python's `True == 1 == 1.0` would let other types in."""

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,15}})?) ?({'|'.join(_UNITS)})")


class Section(BaseModel):
    """One section of the YAML file: immutable, and strict about names and types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def bytes_in(size: str) -> int:
    """Returns the number of bytes that a size such as `6GiB` or `1.5 GB` names."""
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"{shortened(size)!r} is not a size: write a number and one of {', '.join(_UNITS)}")
    return int(float(match[1]) * _UNITS[match[2]])


def _check_budget(value: object) -> object:
    if isinstance(value, str):
        try:
            if bytes_in(value) == 0:
                raise ValueError("a budget of no bytes holds nothing")
        except ValueError as error:
            raise PydanticCustomError("refused", "{reason}", {"reason": str(error)}) from error
        return value
    if isinstance(value, float) and 0.0 < value <= 1.0:
        return value
    raise PydanticCustomError(
        "budget", "must be a size such as 6GiB, or a share of the peak without recomputation, above 0.0 and up to 1.0"
    )


Budget = Annotated[
    str | float,
    BeforeValidator(_check_budget),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": f"^{_SIZE.pattern}$", "examples": ["6GiB"]},
                {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            ]
        }
    ),
]
"""A size such as `6GiB`, or a share such as `0.5` of the peak without recomputation."""


def _check_plan(text: str) -> str:
    try:
        parse_plans(text)
    except PlanError as error:
        raise PydanticCustomError("refused", "{reason}", {"reason": str(error)}) from error
    return text


def _check_plans(texts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        join_plans(texts)
    except PlanError as error:
        raise PydanticCustomError("refused", "{reason}", {"reason": str(error)}) from error
    return texts


PlanText = Annotated[str, Field(examples=["BiasGelu+:1:-1"]), AfterValidator(_check_plan)]
"""One recomputation plan, or several joined by commas."""

Plans = Annotated[tuple[PlanText, ...], Field(strict=False), AfterValidator(_check_plans)]
"""Recomputation plans that do not contradict each other."""
