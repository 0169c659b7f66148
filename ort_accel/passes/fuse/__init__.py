"""Joining neighbouring operators where ONNX Runtime does not do it by itself; this file only orders them."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ort_accel.passes.fuse.cross_entropy import fuse_cross_entropy_gradient
from ort_accel.passes.fuse.tied_embedding import fuse_tied_embedding
from ort_accel.passes.fuse.upcast_attention import widen_attention
from ort_accel.reporting import Report

FUSIONS: dict[str, Callable[[fx.Graph], int]] = {
    "cross-entropy gradient": fuse_cross_entropy_gradient,
    "tied embedding's gradient": fuse_tied_embedding,
    "attention in single precision": widen_attention,
}
"""Each rewrites a graph in place and returns how often it did."""


def fuse(graph: fx.Graph, report: Report) -> None:
    """Apply all fusions; the report counts them by name."""
    for name, fusion in FUSIONS.items():
        if count := fusion(graph):
            report.counters[f"fused {name}"] += count
