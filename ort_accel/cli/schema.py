"""`ort-accel schema`: the configuration as JSON Schema, for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ort_accel.config.fields import Shape

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file instead of printing.")
    ] = None,
) -> None:
    """Print the JSON Schema of the configuration, with which editors complete keys and explain them.

    \b
    Examples:
      ort-accel schema
      ort-accel schema -o ort_accel.schema.json

    \b
    In editors that run yaml-language-server, begin a configuration with this line:
      # yaml-language-server: $schema=ort_accel.schema.json
    """
    text = json.dumps(config_schema(), indent=2, ensure_ascii=False)
    if output is None:
        typer.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        typer.echo(f"{output}: cannot be written: {error.strerror or error}", err=True)
        raise typer.Exit(2) from error


def config_schema() -> Shape:
    """JSON Schema, draft 2020-12, of a configuration file."""
    from ort_accel.config.schema import Config

    made = Config.model_json_schema()
    extends = {
        "type": "string",
        "description": "Another file, beside this one, whose keys hold where this one has none.",
    }
    properties = {"extends": extends, **made.pop("properties")}
    schema = {"$schema": _DIALECT, **made, "title": "ort_accel configuration", "properties": properties}
    _join_lines(schema)
    return schema


def _join_lines(node: object) -> None:
    """Docstrings are wrapped for the source file; editors wrap by themselves."""
    if isinstance(node, dict):
        if isinstance(node.get("description"), str):
            node["description"] = " ".join(node["description"].split())
        for child in node.values():
            _join_lines(child)
    elif isinstance(node, list):
        for child in node:
            _join_lines(child)
