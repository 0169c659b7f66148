"""`ort-accel compare-stats`: the activation statistics of two runs side by side, and where they part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ort_accel.cli.exits import errors_as_exit_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ort_accel.subscribers.comparison import Difference

_MAX_ROWS = 10


def compare_stats(
    first: Annotated[Path, typer.Argument(metavar="A", help="A folder of activation statistics.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    tolerance: Annotated[float, typer.Option(min=0.0, help="Up to this share of the values, it is rounding.")] = 1e-3,
    everything: Annotated[bool, typer.Option("--all", help="List what agrees, too.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with all modules and plots.")] = None,
) -> None:
    """Line up two runs module by module and name the first module where they part.

    observe.activation_statistics and StatisticsSubscriber write the folders. The exit code is 0 if the runs agree, 1 if
    they part, and 2 if a folder cannot be read.

    \b
    Examples:
      ort-accel compare-stats eager-statistics ort-statistics
      ort-accel compare-stats a b --tolerance 1e-5 --all
      ort-accel compare-stats a b --html out.html
    """
    from rich.console import Console

    from ort_accel.subscribers.comparison import compare, first_divergence
    from ort_accel.subscribers.comparison_page import comparison_page, verdict

    with errors_as_exit_code():
        differences = compare(first, second)
        if html is not None:
            _write(html, comparison_page((str(first), str(second)), differences, tolerance))
    parted = first_divergence(differences, tolerance)
    shown = differences if everything else _around(differences, parted, tolerance)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if shown:
        console.print(_table(shown, tolerance))
    typer.echo(verdict(differences, tolerance))
    if parted is not None:
        raise typer.Exit(1)


def _write(file: Path, text: str) -> None:
    from ort_accel.errors import OrtAccelError
    from ort_accel.files import write_aside

    try:
        write_aside(file, text.encode())
    except OSError as error:
        raise OrtAccelError(f"--html: {file} cannot be written: {error.strerror or error}") from error


def _around(differences: Sequence[Difference], parted: Difference | None, tolerance: float) -> list[Difference]:
    """Returns the last difference within the tolerance before the runs part, and the first beyond it."""
    if parted is None:
        return []
    start = differences.index(parted)
    diverged = [item for item in differences[start:] if item.amount > tolerance]
    return [*differences[max(start - 1, 0) : start], *diverged[:_MAX_ROWS]]


def _table(differences: Sequence[Difference], tolerance: float) -> Table:
    from rich.text import Text

    from ort_accel.observe.text_tables import text_table

    table = text_table(("step", "direction", "module", "kind", "difference", "what differs most"), right=(0,))
    for item in differences:
        place = item.module or "(model)"
        module = f"{place}, call {item.call}" if item.call else place
        amount = Text(f"{item.amount:.2g}", style="red" if item.amount > tolerance else "green")
        table.add_row(str(item.step), item.direction, Text(module), Text(item.kind), amount, Text(item.what))
    return table
