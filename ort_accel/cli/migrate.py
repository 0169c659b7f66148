"""`ort-accel migrate`: the settings of ORTModule as a configuration file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ort_accel.cli.exits import errors_as_exit_code


def migrate(
    env_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read KEY=VALUE lines from this file, and not the environment."),
    ] = None,
    memory_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A JSON list of plans, in place of the file in ORTMODULE_MEMORY_OPT_CONFIG."),
    ] = None,
) -> None:
    """Print a configuration made from the ORTMODULE_* variables that are set.

    Each key is followed by the variable it comes from. Comments say what behaves differently, and which variables have
    no key and why. A value that cannot be used is an error with exit code 2.

    \b
    Examples:
      ort-accel migrate > ort_accel.yaml
      ort-accel migrate --env-file train.env > ort_accel.yaml
      ort-accel migrate --memory-config plans.json
      ORTMODULE_MEMORY_OPT_LEVEL=1 ort-accel migrate | ort-accel check -
    """
    from ort_accel.config import env_file as variables
    from ort_accel.config import migrate as migration

    with errors_as_exit_code():
        found = variables.read_env_file(env_file) if env_file else variables.from_environment(os.environ)
        if memory_config:
            found.append(variables.Variable(migration.PLANS_VARIABLE, str(memory_config), "--memory-config"))
        text = migration.to_yaml(migration.migrate(found))
    typer.echo(text, nl=False)
