"""Writes `configs/default.yaml` and `docs/configuration.md` from the schema: `python -m ort_accel.config.reference`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from ort_accel.config.fields import Shape, allowed, resolve, schema
from ort_accel.config.yaml_writer import flow

WIDTH = 100
_ROOT = Path(__file__).parents[2]


def default_yaml() -> str:
    """Returns the file that has every key with its default, explained."""
    head = [
        "# Every key with its default value, so this file changes nothing as it stands. Copy what you want to set.",
        "# Written by `python -m ort_accel.config.reference`.",
        "",
        "# The defaults of another file, which this one then changes. Relative to this file.",
        "# extends: other.yaml",
        "",
    ]
    return "\n".join([*head, *_section(schema(), ""), ""])


def _section(shape: Shape, indent: str) -> Iterator[str]:
    for key, below in shape["properties"].items():
        comment = f"{_text(below)} Allowed: {allowed(below)}." if not _is_section(below) else _text(below)
        yield from (f"{indent}# {line}" for line in _wrap(comment, WIDTH - 2 - len(indent)))
        if _is_section(below) and not _optional(below):
            yield f"{indent}{key}:"
            yield from _section(resolve(below), f"{indent}  ")
            continue
        yield f"{indent}{key}: {flow(below.get('default'))}"
        if _is_section(below):
            yield f"{indent}# To switch it on, give it these keys in place of null:"
            example = "\n".join(_section(_with_example(resolve(below)), "")).strip()
            yield from (f"{indent}#   {line}".rstrip() for line in example.splitlines())
        yield ""


def configuration_md() -> str:
    """Returns the reference: a table for each section."""
    lines = [
        "# Configuration",
        "",
        "Every key of the YAML file. All have a default, so a file holds only what differs. `ort-accel check FILE`",
        "finds mistakes, and [default.yaml](../configs/default.yaml) is a file to copy from. A value of `auto` may",
        "decide either way, and the report says which and why; any other value is obeyed or is an error.",
        "",
        "`extends: other.yaml` at the top of a file takes that file first and lays this one on it: sections are",
        "joined key by key, lists and values are replaced. The name is relative to the file that holds it.",
        "",
        "The text is YAML 1.2: `true` and `false` are the booleans, `yes`, `on`, `no` and `off` are text. Environment",
        "variables are not expanded.",
        "",
        "Written by `python -m ort_accel.config.reference` from the docstrings of `ort_accel/config/sections/`.",
        "",
    ]
    top = {key: shape for key, shape in schema()["properties"].items() if not _is_section(shape)}
    lines += [*_table(top), ""]
    for path, shape in _sections(schema(), ""):
        lines += [f"{'#' * (path.count('.') + 2)} `{path}`", "", _text(shape), ""]
        lines += [*_table(resolve(shape)["properties"]), ""]
    return "\n".join(lines)


def _sections(shape: Shape, prefix: str) -> Iterator[tuple[str, Shape]]:
    for key, below in resolve(shape)["properties"].items():
        if _is_section(below):
            yield f"{prefix}{key}", below
            yield from _sections(below, f"{prefix}{key}.")


def _table(properties: dict[str, Shape]) -> Iterator[str]:
    yield "| key | allowed | default | effect |"
    yield "|---|---|---|---|"
    for key, shape in properties.items():
        default = "must be given" if "default" not in shape else f"`{flow(shape['default'])}`"
        if _is_section(shape) and not _optional(shape):
            default = "see below"
        yield f"| `{key}` | {_cell(allowed(shape))} | {default} | {_cell(_text(shape))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _text(shape: Shape) -> str:
    description = shape.get("description") or resolve(shape).get("description", "")
    return " ".join(str(description).split())


def _is_section(shape: Shape) -> bool:
    return "properties" in resolve(shape)


def _optional(shape: Shape) -> bool:
    return "anyOf" in shape


def _with_example(shape: Shape) -> Shape:
    """Returns the shape with an example for each key that must be given."""
    required = set(shape.get("required", ()))
    properties = shape["properties"].items()
    return {
        "properties": {
            key: below | ({"default": below["examples"][0]} if key in required else {}) for key, below in properties
        }
    }


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


FILES = {"configs/default.yaml": default_yaml, "docs/configuration.md": configuration_md}


def main() -> None:
    """Write both files."""
    for name, render in FILES.items():
        (_ROOT / name).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
