"""The command `ort-accel`: puts the commands of this folder together, and nothing else."""

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
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("check")(check.check)
app.command("schema")(schema.schema)
app.command("env")(env.env)
app.command("migrate")(migrate.migrate)
app.command("explain")(explain.explain)
app.command("bench")(bench.bench)
app.command("init")(init.init)
app.command("launch", context_settings=launch.SETTINGS, add_help_option=False)(launch.launch)
app.command("compare-stats")(compare_stats.compare_stats)


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
