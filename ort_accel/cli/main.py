"""The command `ort-accel`: it puts the commands of this folder together, and nothing else."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import ort_accel
from ort_accel.cli import bench, check, compare_stats, env, explain, init, launch, migrate, schema
from ort_accel.errors import RuntimeMissingError

app = typer.Typer(
    name="ort-accel",
    help="Hugging Face training on ONNX Runtime: an unchanged model, set up by one YAML file.",
    epilog="Each command shows examples: `ort-accel check --help`.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("check", short_help="Find every mistake in configuration files.")(check.check)
app.command("schema", short_help="Print a JSON Schema for editors.")(schema.schema)
app.command("env", short_help="Show versions, and what is missing.")(env.env)
app.command("migrate", short_help="Turn ORTMODULE_* variables into YAML.")(migrate.migrate)
app.command("explain", short_help="Show what of a model runs where, and why.")(explain.explain)
app.command("bench", short_help="Time a step beside eager and Inductor.")(bench.bench)
app.command("init", short_help="Write the files for a launch.")(init.init)
app.command("launch", short_help="Run a training script on ONNX Runtime.", **launch.SETTINGS)(launch.launch)
app.command("compare-stats", short_help="Find where two runs part.")(compare_stats.compare_stats)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ort-accel {ort_accel.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):  # YAML and JSON are UTF-8, whatever the terminal is set to
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        app(prog_name="ort-accel")
    except RuntimeMissingError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
    except OSError as error:
        sys.exit(f"ort-accel: {error}")
