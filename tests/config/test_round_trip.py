"""`Config.to_yaml()` and `load_config` are each other's inverse."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ort_accel.config import Config
from ort_accel.config.declaration import broken
from ort_accel.config.fields import keys_of, resolve, shape_at
from ort_accel.config.load import load_config_text
from ort_accel.config.plan_text import Plan
from ort_accel.config.scalars import read_scalar, write_scalar
from ort_accel.config.tree import MAX_INTEGER, plain
from ort_accel.config.yaml_file import parse
from ort_accel.config.yaml_writer import to_yaml

text = st.text(st.characters(codec="utf-8"), max_size=20)
paths = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
numbers = st.integers(-MAX_INTEGER, MAX_INTEGER)
fractions = st.floats(allow_nan=False, allow_infinity=False)
plans = st.builds(Plan, st.from_regex(r"([A-Z][a-z]+\+){1,3}", fullmatch=True), st.integers(0, 2), st.just(-1))


def values(path: tuple[str, ...], shape: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a key may hold, most of the time."""
    if path == ("memory", "plans"):
        return st.lists(plans.map(str), max_size=3, unique_by=lambda plan: plan.split(":")[0])
    if path == ("memory", "budget"):
        return st.none() | st.sampled_from(["6GiB", "1.5 GB"]) | st.floats(1e-9, 1.0)
    if "anyOf" in shape:
        return st.one_of([values(path, branch) for branch in shape["anyOf"]])
    if "const" in shape or "enum" in shape:
        return st.sampled_from(shape.get("enum", [shape.get("const")]))
    if "properties" in resolve(shape):
        return st.fixed_dictionaries({key: values((*path, key), shape_at((*path, key))) for key in keys_of(path)})
    if shape["type"] == "array":
        return st.lists(values((*path, "[]"), shape["items"]), max_size=3)
    if "pattern" in shape:
        return st.from_regex(re.compile(shape["pattern"], re.ASCII), fullmatch=True)
    return paths if shape.get("format") == "path" else simple(shape)


def simple(shape: dict[str, Any]) -> st.SearchStrategy[Any]:
    low = shape.get("minimum", shape.get("exclusiveMinimum"))
    high = shape.get("maximum", shape.get("exclusiveMaximum"))
    match shape["type"]:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, MAX_INTEGER if high is None else high)
        case "number":
            inside = {"exclude_min": "minimum" not in shape, "exclude_max": "exclusiveMaximum" in shape}
            return st.floats(low, high, allow_infinity=False, **inside)
        case "object":
            return st.dictionaries(text, text | numbers | fractions | st.booleans())
    return text


def obeying(config: Config) -> Config:
    """The configuration, with the keys that break a rule set back to their default."""
    data, defaults = config.to_dict(), Config().to_dict()
    for rule, _ in broken(config):
        for key in rule.keys:
            *sections, leaf = key.split(".")
            at, default = data, defaults
            for section in sections:
                at, default = at[section], (default or {}).get(section)
            at[leaf] = (default or {}).get(leaf)
    return Config.model_validate(data)


@given(values((), shape_at(())))
def test_every_config_comes_back_from_its_yaml(data):
    config = obeying(obeying(obeying(Config.model_validate(data))))
    assert load_config_text(config.to_yaml()) == config


scalars = st.none() | st.booleans() | numbers | fractions | text
trees = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=8)


@given(st.dictionaries(text, trees | st.dictionaries(text, trees, max_size=4), min_size=1, max_size=6))
def test_all_plain_data_comes_back_with_its_types(data):
    tree, problems = parse(to_yaml(data), "x")
    assert problems == []
    assert repr(plain(tree)) == repr(data)


@given(
    st.sampled_from(
        ["yes", "No", "on", "null", "~", "", "1", "017", "1:0", "0x1f", ".inf", "1e3", "true", "<<", "a: b", "-", "é"]
    )
)
def test_text_that_looks_like_something_else_is_quoted(word):
    assert write_scalar(word).startswith('"')


@given(text)
def test_what_is_not_quoted_is_read_as_the_same_text(word):
    written = write_scalar(word)
    assert written.startswith('"') or read_scalar(written) == word


def test_numbers_beyond_all_bounds_come_back():
    tree, _ = parse(to_yaml({"a": [float("inf"), float("-inf"), float("nan")]}), "x")
    assert repr(plain(tree)) == "{'a': [inf, -inf, nan]}"


def test_a_key_of_any_length_comes_back():
    data = {"k" * 5000: {"a": 1}, "é" * 600: "b"}
    tree, _ = parse(to_yaml(data), "x")
    assert plain(tree) == data
