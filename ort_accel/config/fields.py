"""Looks up keys in the schema by path, and puts their allowed values into words."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ort_accel.config.scalars import write_scalar
from ort_accel.config.schema import Config
from ort_accel.config.tree import KeyPath

Shape = dict[str, Any]
"""The JSON Schema of one key."""


@cache
def schema() -> Shape:
    """The JSON Schema of the whole configuration."""
    return Config.model_json_schema()


def resolve(shape: Shape) -> Shape:
    """Returns the shape that a reference, or a choice between a reference and null, stands for."""
    for branch in shape.get("anyOf", ()):
        if "$ref" in branch:
            return resolve(branch)
    if "$ref" in shape:
        found: Shape = schema()["$defs"][shape["$ref"].rpartition("/")[2]]
        return found
    return shape


def below(shape: Shape, part: str | int) -> Shape | None:
    """Returns the shape under a key or list position, or None where the schema has no such thing."""
    shape = resolve(shape)
    if isinstance(part, int):
        return shape.get("items")
    known: Shape | None = shape.get("properties", {}).get(part)
    more = shape.get("additionalProperties")
    return known if known is not None else more if isinstance(more, dict) else None


def shape_at(path: KeyPath) -> Shape:
    """Returns the shape of the key at a path that the schema knows."""
    shape: Shape = schema()
    for part in path:
        found = below(shape, part)
        assert found is not None, path
        shape = found
    return shape


def known_part(location: KeyPath) -> KeyPath:
    """Returns the beginning of a path that the schema knows; pydantic appends the branches of a union."""
    shape: Shape | None = schema()
    for depth, part in enumerate(location):
        shape = below(shape, part) if shape else None
        if shape is None:
            return location[:depth]
    return location


def keys_of(path: KeyPath) -> list[str]:
    """Returns the keys of a section, in the order of the schema."""
    return list(resolve(shape_at(path)).get("properties", ()))


def all_keys(path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yields every key of the schema with its section, sections included."""
    for key in keys_of(path):
        yield (*path, key)
        yield from all_keys((*path, key))


def allowed(shape: Shape) -> str:
    """Returns the allowed values of a key, in words."""
    if "anyOf" in shape:
        return ", ".join(map(allowed, shape["anyOf"]))
    if "const" in shape or "enum" in shape:
        return ", ".join(map(write_scalar, shape.get("enum", [shape.get("const")])))
    shape = resolve(shape)
    match shape["type"]:
        case "object" if "properties" in shape:
            return f"a map with the keys {', '.join(shape['properties'])}"
        case "object":
            return f"a map from names to {allowed(shape['additionalProperties']).replace(', ', ' or ')}"
        case "array":
            return f"a list of {allowed(shape['items'])}"
        case "boolean":
            return "true, false"
        case "string":
            return _text(shape)
        case "integer":
            return f"a whole number{_range(shape)}"
        case "number":
            return f"a number{_range(shape)}"
    return str(shape["type"])


def choices(shape: Shape) -> list[str]:
    """Returns the words that a key may hold, as they are written in YAML."""
    shape = shape if "anyOf" in shape else {"anyOf": [shape]}
    found: list[str] = []
    for branch in shape["anyOf"]:
        found += map(write_scalar, branch.get("enum", [branch["const"]] if "const" in branch else []))
        found += {"boolean": ["true", "false"], "null": ["null"]}.get(branch.get("type", ""), [])
    return found


def _text(shape: Shape) -> str:
    if shape.get("format") == "path":
        return "a path"
    return f"text such as {shape['examples'][0]}" if "examples" in shape else "text"


def _range(shape: Shape) -> str:
    low, high = shape.get("minimum"), shape.get("maximum")
    above, less = shape.get("exclusiveMinimum"), shape.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low:g} to {high:.10g}"
    parts = [f"from {low:g} on" if low is not None else "", f"above {above:g}" if above is not None else ""]
    parts += [f"up to {high:.10g}" if high is not None else "", f"below {less:g}" if less is not None else ""]
    return "".join(f" {part}" for part in parts if part)
