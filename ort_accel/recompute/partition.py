"""Dividing the joint graph into a forward and a backward graph."""

from __future__ import annotations

from typing import Any

from functorch.compile import default_partition
from torch import fx

from ort_accel.recompute.views import retake_views


def partition(joint: fx.GraphModule, inputs: Any, **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Keep what eager mode keeps, less the views; what activation checkpointing marked is computed again."""
    retake_views(joint)
    forward, backward = default_partition(joint, inputs, **how)
    return forward, backward
