"""The exit of a command that cannot do its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ort_accel.errors import OrtAccelError


@contextmanager
def errors_as_exit_code() -> Iterator[None]:
    """Print an error of ort_accel, and exit with code 2."""
    try:
        yield
    except OrtAccelError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
