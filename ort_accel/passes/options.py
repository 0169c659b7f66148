"""Options of graph passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from ort_accel.config.sections.precision import CastPropagation


@dataclass(frozen=True)
class PassOptions:
    """Switches of graph passes, and facts that passes need beside the graph."""

    fusions: bool = True
    """Run passes that remove or join operators, apart from those on casts."""
    casts: CastPropagation = field(default_factory=CastPropagation)
    is_cached_weight: Callable[[fx.Node], bool] | None = None
    """Tells the inputs whose casts are kept between micro-batches; None where no cast is kept."""
