"""`density:` not computing what padding and ignored labels make useless."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ort_accel.config.declaration import NO_ROW, Row
from ort_accel.config.values import Section, Switch


class Density(Section):
    """Skipping of padding and of ignored labels. Losses and gradients are those of the full computation, within
    rounding."""

    labels: Switch = "auto"
    """Compute loss and head only for the tokens whose label is not ignored. `auto` does so while the share of the work
    that batches need is below `threshold`; `true` does so always, and makes it an error if nothing can be left out in
    training; `false` never."""

    padding: Switch = "auto"
    """Compute token-wise work only for tokens that are not padding. `auto` does so while the share of the work that
    batches need is below `threshold` and the model is shown not to read padded positions; `true` does so always, and
    makes it an error in training if that cannot be shown."""

    threshold: Annotated[float, Field(gt=0.0, le=1.0), NO_ROW] = 0.9
    """The share of the work below which `auto` skips: of the last ten batches, in matrix products. Lower it if batches
    near the threshold run faster dense."""

    inspect: Annotated[bool, Row("the density table, every {1} batches", reads=("density.inspect_every",))] = False
    """Print the density table: for every input, how many of its tokens count. Use it to see what skipping or packing
    would gain before switching anything on."""

    inspect_every: Annotated[int, Field(ge=1), NO_ROW] = 10
    """Print the density table every so many steps."""
