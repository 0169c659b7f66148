"""`ort-accel init`: a few questions, and the two YAML files that answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from ort_accel.cli.exits import errors_as_exit_code
from ort_accel.cli.presets import Machine, accelerate_config

ACCELERATE_FILE, ORT_ACCEL_FILE = "accelerate.yaml", "ort_accel.yaml"


class Precision(StrEnum):
    """The mixed precision of accelerate that the engine knows."""

    NO = "no"
    BF16 = "bf16"


class Fallback(StrEnum):
    """The values of `engine.fallback`."""

    WARN = "warn"
    REPORT = "report"
    ERROR = "error"


Choice = TypeVar("Choice", bound=StrEnum)


def init(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the files go.")] = Path(),
    machine: Annotated[Machine | None, typer.Option(help="What trains.", show_default="single-cpu")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many processes train.", show_default="1 or 2")
    ] = None,
    mixed_precision: Annotated[Precision | None, typer.Option(help="Of accelerate.", show_default="no")] = None,
    fallback: Annotated[Fallback | None, typer.Option(help="engine.fallback.", show_default="warn")] = None,
    cache_dir: Annotated[str | None, typer.Option(metavar="FOLDER", help="engine.cache_dir; empty for none.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; what is not given is at its default.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
) -> None:
    """Write accelerate.yaml and ort_accel.yaml, after some questions like those of `accelerate config`.

    Each option answers one question. The first file is for `ort-accel launch --config_file`, and names the second.
    The exit code is 2 where a file is there already, or an answer is not possible.

    \b
    Examples:
      ort-accel init
      ort-accel init training --machine ddp --processes 2 --yes
      ort-accel init --yes --fallback error --cache-dir out/cache --force
    """
    _refuse_to_overwrite(folder, force)
    with _explained_end_of_input():
        _ask_and_write(folder, machine, processes, mixed_precision, fallback, cache_dir, yes)


def _ask_and_write(
    folder: Path,
    machine: Machine | None,
    processes: int | None,
    mixed_precision: Precision | None,
    fallback: Fallback | None,
    cache_dir: str | None,
    yes: bool,
) -> None:
    machine = _answer("What trains, and how is it shared?", machine, Machine.SINGLE_CPU, yes)
    processes = _processes(machine, processes, yes)
    mixed_precision = _answer("Mixed precision?", mixed_precision, Precision.NO, yes)
    fallback = _answer("When ONNX Runtime cannot run a part of a model?", fallback, Fallback.WARN, yes)
    if cache_dir is None:
        question = "Folder that keeps compiled models between runs (empty for none)?"
        cache_dir = "" if yes else typer.prompt(question, default="", show_default=False)
    _write(
        folder, accelerate_config(machine, processes, mixed_precision.value), ort_accel_yaml(fallback.value, cache_dir)
    )
    typer.echo(
        f"wrote {folder / ACCELERATE_FILE} and {folder / ORT_ACCEL_FILE}\n"
        f"train with: ort-accel launch --config_file {folder / ACCELERATE_FILE} SCRIPT"
    )


@contextmanager
def _explained_end_of_input() -> Iterator[None]:
    """Print a way out where the input ends before the last question, as in a script or a container."""
    try:
        yield
    except typer.Abort as error:
        if not isinstance(error.__context__, EOFError):
            raise
        typer.echo("\nthe input ended before all questions were answered, and nothing was written", err=True)
        typer.echo("answer them by options (ort-accel init --help), or take the defaults with --yes", err=True)
        raise typer.Exit(2) from error


def ort_accel_yaml(fallback: str, cache_dir: str) -> str:
    """Returns the text of ort_accel's file."""
    from ort_accel.config.yaml_writer import to_yaml

    kept = {"cache_dir": cache_dir} if cache_dir else {}
    return to_yaml({"version": 1, "engine": {"fallback": fallback, **kept}})


def _refuse_to_overwrite(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        typer.echo(f"{folder}: is no folder; name another one", err=True)
        raise typer.Exit(2)
    there = [str(folder / name) for name in (ACCELERATE_FILE, ORT_ACCEL_FILE) if (folder / name).exists()]
    if there and not force:
        typer.echo(f"{' and '.join(there)}: there already; name another folder, or write over with --force", err=True)
        raise typer.Exit(2)


def _answer(question: str, given: Choice | None, default: Choice, yes: bool) -> Choice:
    if given is not None or yes:
        return default if given is None else given
    kind = type(default)
    return kind(typer.prompt(f"{question} [{'/'.join(kind)}]", default=default.value, value_proc=_one_of(kind)))


def _one_of(kind: type[StrEnum]) -> Callable[[str], str]:
    def check(answer: str) -> str:
        if answer.strip().lower() not in list(kind):
            raise typer.BadParameter(f"{answer!r} is not one of {', '.join(kind)}")
        return answer.strip().lower()

    return check


def _whole_number(answer: str) -> int:
    if not answer.strip().isdecimal() or int(answer) < 1:
        raise typer.BadParameter(f"{answer!r} is not a number from 1 on")
    return int(answer)


def _processes(machine: Machine, given: int | None, yes: bool) -> int:
    if machine.is_single:
        if given not in (None, 1):
            typer.echo(f"--processes {given}: {machine} is one process; choose --machine {Machine.DDP}", err=True)
            raise typer.Exit(2)
        return 1
    if given is not None or yes:
        return given or 2
    count: int = typer.prompt("How many processes?", default=2, value_proc=_whole_number)
    return count


def _write(folder: Path, accelerate_keys: dict[str, object], ort_accel_text: str) -> None:
    import yaml

    from ort_accel.config.load import SECTION, load_config_text

    with errors_as_exit_code():
        load_config_text(ort_accel_text, ORT_ACCEL_FILE)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ORT_ACCEL_FILE).write_text(ort_accel_text)
    (folder / ACCELERATE_FILE).write_text(yaml.safe_dump({**accelerate_keys, SECTION: ORT_ACCEL_FILE}, sort_keys=False))
