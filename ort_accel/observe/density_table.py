"""The density table as text for a terminal."""

from __future__ import annotations

import sys

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ort_accel.observe.axes import short
from ort_accel.observe.feature_table import WIDTH_CHARACTERS
from ort_accel.observe.text_tables import plain_text, text_table
from ort_accel.reporting.batches import InputDensity, Inspection

HEADINGS = (
    *("STEP", "INPUT TYPE", "INPUT NAME", "PAD IDX", "DENSITY", "VALID TOKENS", "TOTAL TOKENS"),
    "VALID TOKENS/BATCH",
)
NUMBERS = (0, 3, 4, 5, 6)
"""The indices of its columns of numbers."""
SCHEME_HEADINGS = ("FLOPs a batch, estimated", "of dense")
"""The headings of the figures of each batching scheme."""
_MAX_SHOWN_ROWS = 16


def print_density(inspection: Inspection) -> None:
    """Print the table on the standard error."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(_render(inspection))
    else:
        print(density_table(inspection), file=sys.stderr)


def density_table(inspection: Inspection, width: int = WIDTH_CHARACTERS) -> str:
    """Returns the table as plain text."""
    return plain_text(_render(inspection), width)


def cells(row: InputDensity) -> tuple[str, ...]:
    """Returns the cells of a row."""
    shown = ", ".join(map(str, row.rows[:_MAX_SHOWN_ROWS])) + (", ..." if len(row.rows) > _MAX_SHOWN_ROWS else "")
    pad = "" if row.pad is None else str(row.pad)
    amounts = f"{row.density:.1%}", f"{row.valid:,}", f"{row.total:,}"
    return (str(row.step), row.kind, row.name, pad, *amounts, f"[{shown}]")


def scheme_rows(inspection: Inspection) -> list[tuple[str, str, str]]:
    """Returns the name of each batching scheme, its FLOPs a batch, and its share of the dense scheme's FLOPs."""
    dense = inspection.ways[0].flops if inspection.ways else 0.0
    return [
        (way.name, short(way.flops / inspection.batches), f"{way.flops / dense:.1%}" if dense else "-")
        for way in inspection.ways
    ]


def balancing(inspection: Inspection) -> str:
    """Returns a sentence on the gain of load balancing; empty if it is unknown."""
    if inspection.waiting is None:
        return ""
    before, after = inspection.waiting
    return (
        f"{inspection.processes} processes would wait {before:.1%} of the time for the one with the most tokens, "
        f"{after:.1%} with load balancing (distributed.load_balancing)"
    )


def _render(inspection: Inspection) -> RenderableType:
    rows = text_table(HEADINGS, NUMBERS)
    for row in inspection.rows:
        rows.add_row(*map(Text, cells(row)))
    batches = text_table((f"the last {inspection.batches} batches", *SCHEME_HEADINGS), right=(1, 2))
    for scheme in scheme_rows(inspection):
        batches.add_row(*map(Text, scheme))
    said = balancing(inspection)
    return Group(rows, Text(), *([batches] if inspection.ways else []), *([Text(said)] if said else []))
