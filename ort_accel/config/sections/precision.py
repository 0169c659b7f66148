"""`precision:` casts in mixed precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.declaration import NO_ROW, Row, conflict
from ort_accel.config.values import Section, Switch
from ort_accel.reporting.report import State


class CastPropagation(Section):
    """Moving casts so that more of the graph computes in the smaller type."""

    level: Annotated[int, Field(ge=0, le=2)] = 1
    """0 leaves casts where autocast put them. 1 casts a tensor into a type once, and leaves out casts into a wider type
    and back, also with views between; no bit changes. 2 also moves them past the operators in `allow`, which changes
    rounding."""

    strategy: Annotated[Literal["flood_fill", "insert_and_reduce"], NO_ROW] = "flood_fill"
    """The way of casts at level 2: `flood_fill` grows regions of the smaller type from the casts that exist;
    `insert_and_reduce` adds casts around every operator in `allow` and then cancels neighbours, so that operators
    with fp32 inputs compute in the smaller type as well."""

    allow: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Z]\w*$", examples=["Softmax"])], ...],
        Field(strict=False),
        conflict(
            lambda allow, level: allow and level != 2,
            "used at level 2 only, and precision.cast_propagation.level is {1}; write 2 there",
            "precision.cast_propagation.level",
        ),
        NO_ROW,
    ] = ()
    """ONNX operators that may compute in the smaller type at level 2, such as `[Softmax, Gelu]`. Sums, means, norms,
    losses and powers cannot be named: what they add up stays in single precision."""


class Precision(Section):
    """The treatment of casts under autocast (bf16 or fp16). Without autocast it has nothing to do."""

    cast_propagation: CastPropagation = CastPropagation()

    cache_cast_weights: Annotated[
        Switch, Row("no gradients were accumulated under autocast yet", State.OFF, off="switched off")
    ] = "auto"
    """Keep the smaller copy of each weight between the micro-batches of one optimizer step, instead of casting anew.
    `auto` begins when it sees gradients being accumulated, `true` with the first batch. Costs one smaller copy of the
    weights during backward; copies are dropped before the optimizer's step."""
