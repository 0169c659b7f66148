"""All graph passes, in their order.

A pass is a file of this folder with a function of its name. The function takes a graph and `PassOptions`, changes the
graph in place, and returns how often it applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, auto
from importlib import import_module

from torch import fx

from ort_accel.passes.options import PassOptions
from ort_accel.reporting.report import Report

PassFunction = Callable[[fx.Graph, PassOptions], int]


class Stage(Flag):
    """Points in the compilation of a graph at which passes run."""

    CAPTURED = auto()
    """Dynamo captured the graph; autograd has not seen it."""
    REDUCED = auto()
    """Rows and outputs that nobody reads were left out; autograd has not seen the graph."""
    JOINT = auto()
    """Autograd traced forward and backward into one graph, which is not split yet."""
    FORWARD = auto()
    BACKWARD = auto()
    INFERENCE = auto()
    """One of these three graphs is about to be compiled."""
    SEGMENTS = auto()
    """Any of these three is about to be cut into segments, or a copy of it whose segments are predicted."""


WHOLE = Stage.JOINT | Stage.INFERENCE
WITH_FORWARD = WHOLE | Stage.FORWARD


def always(_: PassOptions) -> bool:
    """Returns True."""
    return True


def fusions(options: PassOptions) -> bool:
    """True unless `compute.fusions` is false."""
    return options.fusions


@dataclass(frozen=True)
class Pass:
    """An entry of the list of passes."""

    name: str
    """The file in `passes/`, and the function in it."""
    stages: Stage
    is_on: Callable[[PassOptions], bool] = always
    counter: str = ""
    """The report's counter of applications; empty for a pass that the report does not count."""
    run: PassFunction = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", getattr(import_module(f"ort_accel.passes.{self.name}"), self.name))


PASSES = (
    Pass("fix_layouts", Stage.CAPTURED),
    Pass("replace_masked_writes", Stage.CAPTURED),
    Pass("replace_4bit_products", Stage.CAPTURED),
    Pass("remove_weight_sets", Stage.CAPTURED),
    Pass("fuse_rms_norm", Stage.CAPTURED, fusions, "fused RMS norms"),
    Pass("fuse_rotary", Stage.CAPTURED, fusions, "fused rotary embeddings"),
    Pass("fuse_gates", Stage.CAPTURED, fusions, "fused gates"),
    Pass("fuse_linear_cross_entropy", Stage.REDUCED, fusions, "fused heads"),
    Pass("mark_data_numbers", WITH_FORWARD | Stage.BACKWARD),
    Pass("fix_norm_dtypes", WITH_FORWARD),
    Pass("split_dropout", WITH_FORWARD),
    Pass("remove_clones", WHOLE, fusions, "copies left out"),
    Pass("replace_attention", WHOLE, counter="fused attention"),
    Pass("lower_precision", WHOLE, lambda it: it.casts.level == 2, "operators moved into the smaller type"),
    Pass("remove_redundant_casts", WHOLE, lambda it: it.casts.level > 0, "casts left out"),
    Pass("remove_double_transpose", Stage.SEGMENTS),
    Pass("fuse_cross_entropy", Stage.SEGMENTS, fusions, "fused cross-entropy gradient"),
    Pass("fuse_dropout", Stage.SEGMENTS, fusions, "dropouts applied as bits"),
    Pass("fuse_tied_embedding", Stage.SEGMENTS, fusions, "fused tied embedding's gradient"),
    Pass("hoist_weight_casts", Stage.SEGMENTS, lambda it: it.is_cached_weight is not None),
)


def run_passes(graph: fx.Graph, stage: Stage, options: PassOptions, report: Report) -> None:
    """Run the passes of a stage on a graph, and count in the report how often each applied."""
    for each in PASSES:
        if stage in each.stages and each.is_on(options) and (count := each.run(graph, options)) and each.counter:
            report.counters[each.counter] += count
