"""Tables as text, for terminals and files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table


def text_table(headings: Sequence[str], right: Collection[int] = ()) -> Table:
    """Returns an empty table; `right` columns are right-aligned. What does not fit goes on in the next line."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(
            heading,
            overflow="fold",
            justify="right" if index in right else "left",
        )
    return table


def plain_text(content: RenderableType, width: int) -> str:
    """Returns content as text without colours and without blanks at the ends of its lines."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(content)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
