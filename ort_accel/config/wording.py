"""Puts pydantic's errors into the words and places of the file. Only this module reads pydantic's errors."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache

from pydantic import ValidationError

from ort_accel.config.fields import Shape, all_keys, allowed, choices, keys_of, known_part, shape_at
from ort_accel.config.scalars import YAML_1_1_BOOLS, ScalarError, read_scalar, write_scalar
from ort_accel.config.schema import Config
from ort_accel.config.tree import KeyPath, Node, Plain, dotted, plain, position_of, shortened, value_at
from ort_accel.errors import Problem

EXTENDS = "extends"
WITHOUT_QUOTES = " without quotes"
_SYNONYMS = {"gpu": "cuda", "none": "null", "nil": "null"}
_REMOVED: dict[KeyPath, str] = {
    ("compute", "triton"): "kernels are generated on the CPU, too; write generated in its place",
    ("engine", "skip_checks"): "with it, a model that changed between steps gave wrong results; delete this line",
}
"""Keys that earlier versions had, and why they are gone."""
_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def validate(tree: Node) -> tuple[Config | None, list[tuple[KeyPath, Problem, bool]]]:
    """Returns the configuration, or each mistake: its path, its problem, and True if a key is missing."""
    try:
        return Config.model_validate(plain(tree)), []
    except ValidationError as error:
        by_path: dict[KeyPath, list[str]] = {}
        messages: dict[KeyPath, str] = {}
        for mistake in error.errors(include_url=False, include_input=False):
            path = mistake["loc"] if mistake["type"] in {"extra_forbidden", "missing"} else known_part(mistake["loc"])
            by_path.setdefault(path, []).append(mistake["type"])
            messages.setdefault(path, mistake["msg"])
        return None, [_mistake(tree, path, kinds, messages[path]) for path, kinds in by_path.items()]


def _mistake(tree: Node, path: KeyPath, kinds: list[str], message: str) -> tuple[KeyPath, Problem, bool]:
    if "extra_forbidden" in kinds:
        return path, position_of(tree, path, key=True).problem(path, _unknown_key(path)), False
    if "missing" in kinds:
        text = f"this key must be given; allowed: {allowed(shape_at(path))}"
        return path, position_of(tree, path[:-1], key=True).problem(path, text), True
    node = value_at(tree, path)
    text = message if "refused" in kinds else _wrong_value(path, None if node is None else plain(node), kinds)
    return path, position_of(tree, path).problem(path, text), False


def _unknown_key(path: KeyPath) -> str:
    if (reason := _REMOVED.get(path)) is not None:
        return f"this key was removed: {reason}"
    section, key = path[:-1], str(path[-1])
    siblings = keys_of(section) + ([] if section else [EXTENDS])
    return f"unknown key{_meant(_similar_key(section, key, siblings))} allowed: {', '.join(siblings)}"


@cache
def _by_depth() -> list[KeyPath]:
    return sorted(all_keys(), key=len)


def _similar_key(section: KeyPath, key: str, siblings: list[str]) -> str:
    plainer = key.strip().lower().replace("-", "_").replace(" ", "_")
    everywhere = _by_depth()
    if plainer in siblings:
        return dotted((*section, plainer))
    if any(plainer == dotted(known) for known in everywhere):
        return f"{plainer.rpartition('.')[2]}: inside of {plainer.rpartition('.')[0]}:"
    for known in everywhere:
        if known[-1] == plainer:
            return dotted(known)
    if close := get_close_matches(plainer, siblings, n=1):
        return dotted((*section, close[0]))
    if close := get_close_matches(plainer, [str(known[-1]) for known in everywhere], n=1, cutoff=0.75):
        return next(dotted(known) for known in everywhere if known[-1] == close[0])
    return ""


def _wrong_value(path: KeyPath, value: object, kinds: list[str]) -> str:
    shape = shape_at(path)
    trouble = "is out of range" if _OUT_OF_RANGE.intersection(kinds) else "is not allowed"
    meant = _similar_value(shape, value)
    return f"{_seen(value)} {trouble}{_meant(meant if _would_do(path, meant) else '')} allowed: {allowed(shape)}"


def _would_do(path: KeyPath, suggestion: str) -> bool:
    """True if a suggestion is itself allowed at that place."""
    try:
        data: Plain = read_scalar(suggestion.removesuffix(WITHOUT_QUOTES))
    except ScalarError:
        return False
    place = tuple(0 if isinstance(part, int) else part for part in path)
    for part in reversed(path):
        data = [data] if isinstance(part, int) else {part: data}
    try:
        Config.model_validate(data)
    except ValidationError as error:
        return all(known_part(mistake["loc"]) != place for mistake in error.errors(include_url=False))
    return True


def _seen(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, str):
        return f"the text {shortened(value)!r}"
    return "null" if value is None else write_scalar(value)  # type: ignore[arg-type]  # what is left is a scalar


def _similar_value(shape: Shape, value: object) -> str:
    """Returns the spelling of the value that was probably meant; empty if none is similar."""
    words = choices(shape)
    numbers = "integer" in str(shape) or "number" in str(shape)
    if isinstance(value, str):
        return _with_namespace(shape, value) or _similar_text(words, numbers, value)
    if isinstance(value, float) and value.is_integer() and (str(int(value)) in words or "integer" in str(shape)):
        return str(int(value))
    if isinstance(value, bool) or value not in (0, 1):
        return ""
    return write_scalar(bool(value)) if "true" in words else "1.0" if value == 1 and numbers else ""


def _with_namespace(shape: Shape, text: str) -> str:
    """Returns an operator's name with the namespace of the examples where it has none: `aten.gelu` for `gelu`."""
    examples = [example for example in shape.get("examples", ()) if isinstance(example, str) and "." in example]
    namespaces = {example.partition(".")[0] for example in examples}
    return f"{namespaces.pop()}.{text}" if namespaces and text.isidentifier() else ""


def _similar_text(words: list[str], numbers: bool, text: str) -> str:
    plainer = text.strip().lower()
    if plainer in YAML_1_1_BOOLS and "true" in words:
        return write_scalar(YAML_1_1_BOOLS[plainer])
    if _SYNONYMS.get(plainer) in words:
        return _SYNONYMS[plainer]
    if plainer in words:
        return plainer if plainer != text else f"{text}{WITHOUT_QUOTES}"
    try:
        number = read_scalar(plainer.replace("_", "").replace(",", ""))
    except ScalarError:
        number = None
    if numbers and isinstance(number, int | float) and not isinstance(number, bool):
        return f"{number}{WITHOUT_QUOTES}" if plainer == str(number) else str(number)
    close = get_close_matches(plainer, words, n=1) or [word for word in words if len(plainer) > 2 and plainer in word]
    return close[0] if close else ""


def _meant(suggestion: str) -> str:
    return f"; did you mean {suggestion}?" if suggestion else ";"
