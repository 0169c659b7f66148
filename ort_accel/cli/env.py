"""`ort-accel env`: what is installed, what it can do, and what is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ort_accel.cli.environment import Environment, Runtime


def env(as_json: Annotated[bool, typer.Option("--json", help="Print the same for machines.")] = False) -> None:
    """Say which versions are installed, which ONNX Runtime it is and what it can do, and what is missing.

    The exit code is 0 when training can run here, and 1 otherwise.

    \b
    Examples:
      ort-accel env
      ort-accel env --json
    """
    from ort_accel.cli.environment import inspect_environment

    environment = inspect_environment()
    if as_json:
        typer.echo(json.dumps(environment.to_dict(), indent=2))
    else:
        typer.echo("\n".join(_lines(environment)))
    if environment.blockers:
        raise typer.Exit(1)


def _lines(environment: Environment) -> Iterator[str]:
    yield _row("python", environment.python)
    yield _row("platform", environment.platform)
    for name, version in environment.versions.items():
        yield _row(name, version or "not installed")
    yield from _runtime_lines(environment.runtime)
    yield _row("native library", str(environment.native))
    if environment.devices:
        yield _row("cpu threads", str(environment.devices.cpu_threads))
        yield _row("cuda devices", ", ".join(environment.devices.cuda) or "none")
    yield ""
    for blocker in environment.blockers:
        yield from _with_commands("Missing", blocker)
    for warning in environment.warnings:
        yield from _with_commands("Warning", warning)
    if environment.native.missing:
        yield from _with_commands("Native library", environment.native.missing)
    yield "Training cannot run here." if environment.blockers else "Training can run here."


def _with_commands(kind: str, text: str) -> Iterator[str]:
    """Yields a sentence, and each command that it names in a line of its own, to be pasted."""
    commands = _COMMAND.findall(text)
    said = text.partition("; `")[0] if commands else text
    yield f"{kind}: {said}"
    yield from (f"  {command}" for command in commands)


_COMMAND = re.compile(r"`((?:pip|make|sudo) [^`]+)`")


def _runtime_lines(runtime: Runtime | None) -> Iterator[str]:
    if runtime is None:
        yield _row("onnxruntime", "not usable")
        return
    flavor = runtime.flavor
    unusable = [provider for provider in flavor.providers if provider not in runtime.usable_providers]
    yield _row("onnxruntime", f"{flavor.distribution} {flavor.version}")
    yield _row("training build", "yes" if flavor.is_training_build else "no")
    yield _row("providers", ", ".join([*runtime.usable_providers, *(f"{name} (does not load)" for name in unusable)]))
    yield _row("newest opset", f"{flavor.newest_opset} (ONNX IR {flavor.newest_ir_version})")
    for group, kernels in runtime.kernels.items():
        absent = [name for name, runs in kernels.items() if not runs]
        count = f"{len(kernels) - len(absent)} of {len(kernels)} run"
        named = f"; not {', '.join(absent)}" if 0 < len(absent) < len(kernels) else ""
        yield _row(f"{group} kernels", count + named)


def _row(name: str, value: str) -> str:
    return f"{name:<17} {value}"
