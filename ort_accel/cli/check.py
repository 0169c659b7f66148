"""`ort-accel check`: every problem of a configuration file, with its line."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ort_accel.errors import ConfigError, Problem

STDIN = "-"


def check(
    files: Annotated[list[str], typer.Argument(metavar="FILES...", help="YAML files; - reads standard input.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of results for machines.")] = False,
) -> None:
    """Check configuration files, and say all that is wrong with them.

    Good files are named on standard output, problems on standard error, each as file:line:column: key: what is wrong.
    The exit code is 0 when all files are good, and 2 otherwise.

    \b
    Examples:
      ort-accel check configs/default.yaml
      ort-accel check configs/*.yaml --json
      ort-accel migrate | ort-accel check -
    """
    results = {file: _problems(file) for file in files}
    if as_json:
        typer.echo(json.dumps([_as_data(file, problems) for file, problems in results.items()], indent=2))
    else:
        for file, problems in results.items():
            _print(file, problems)
    if any(results.values()):
        raise typer.Exit(2)


def _problems(file: str) -> tuple[Problem, ...]:
    from ort_accel.config.load import load_config, load_config_text

    try:
        if file == STDIN:
            load_config_text(sys.stdin.buffer.read() if sys.stdin else b"", "<stdin>")
        else:
            load_config(file)
    except ConfigError as error:
        return error.problems
    return ()


def _print(file: str, problems: tuple[Problem, ...]) -> None:
    for problem in problems:
        typer.echo(str(problem), err=True)
    if not problems:
        typer.echo(f"{file}: ok")


def _as_data(file: str, problems: tuple[Problem, ...]) -> dict[str, object]:
    return {
        "file": file,
        "ok": not problems,
        "problems": [
            {name: getattr(problem, name) for name in ("source", "line", "column", "path", "message")}
            for problem in problems
        ],
    }
