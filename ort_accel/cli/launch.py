"""`ort-accel launch`: `accelerate launch`, with every model that the script prepares on ONNX Runtime."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ort_accel.cli.exits import errors_as_exit_code

SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False},
    "add_help_option": False,
}
"""Settings for typer: unknown options go on to accelerate's parser."""


def launch(
    context: typer.Context,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT [ARGUMENTS]...", show_default=False)] = None,
    wants_help: Annotated[bool, typer.Option("--help", "-h", help="Show this, and accelerate's options.")] = False,
) -> None:
    """Run an unchanged training script as `accelerate launch` does, with its models on ONNX Runtime.

    Takes all options of `accelerate launch`, and --ort_config FILE. Without --ort_config, the section
    `ort_accel_config:` of accelerate's configuration file counts: a map of ort_accel's keys, or the path of its file,
    relative to this one. Without both, everything is at its default. Several processes on CPUs need no MPI.

    The exit code is that of the script, or 2 if the command or a configuration is wrong.

    \b
    Examples:
      ort-accel launch --cpu train.py --epochs 3
      ort-accel launch --config_file configs/accelerate/ddp.yaml train.py
      ort-accel launch --cpu --num_processes 2 --ort_config configs/default.yaml -m my_package.train
    """
    from ort_accel.cli import launching

    if wants_help:
        typer.echo(f"{context.get_help()}\n\n{launching.accelerate_help()}")
        return
    with errors_as_exit_code():
        raise typer.Exit(launching.launch(arguments or []))
