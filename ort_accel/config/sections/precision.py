"""`precision:` what happens to casts in mixed precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.values import Section, Switch


class CastPropagation(Section):
    """Moving casts so that more of the graph computes in the smaller type."""

    level: Annotated[int, Field(ge=0, le=2)] = 1
    """0 leaves casts where autocast put them. 1 casts a tensor into a type once, and leaves out casts into a wider type
    and back, also with views between; no bit changes. 2 also moves them past the operators in `allow`, which changes
    rounding."""

    strategy: Literal["flood_fill", "insert_and_reduce"] = "flood_fill"
    """How casts travel: `flood_fill` grows regions of the smaller type from the casts that exist; `insert_and_reduce`
    adds casts around single operators and then cancels neighbours. Change it only if the report shows casts that
    remain."""

    allow: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Z]\w*$", examples=["Softmax"])], ...], Field(strict=False)
    ] = ()
    """ONNX operators that may compute in the smaller type at level 2, such as `[Softmax, Gelu]`."""


class Precision(Section):
    """What happens to casts under autocast (bf16 or fp16); without autocast it has nothing to do."""

    cast_propagation: CastPropagation = CastPropagation()
    """Moving casts so that more of the graph computes in the smaller type."""

    cache_cast_weights: Switch = "auto"
    """Keep the smaller copy of each weight between the micro-batches of one optimizer step, instead of casting anew.
    `auto` does so under gradient accumulation when memory allows; costs one smaller copy of the weights."""
