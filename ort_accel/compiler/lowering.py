"""`Lowering`: the sessions, caches and timers that all graphs of a model are compiled with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypedDict

import torch

from ort_accel.autotune.cost_model import Estimator
from ort_accel.autotune.throughput import Machine
from ort_accel.autotune.time_matmuls import TimedMatmuls
from ort_accel.autotune.timer import SavedTimings, Stopwatch, context_of
from ort_accel.autotune.tuner import Tuner
from ort_accel.compiler.generated_kernels import generator_for
from ort_accel.compiler.settings import Settings
from ort_accel.generated.takeover import Generator
from ort_accel.memory.low_memory_mode import TrimOnGrowth
from ort_accel.partition.assign import NodeRules
from ort_accel.passes.options import PassOptions
from ort_accel.reporting.report import Report
from ort_accel.runtime.crash_journal import CrashJournal
from ort_accel.runtime.gradient_release import GradientRelease
from ort_accel.runtime.model_cache import ModelCache, ModelKeys
from ort_accel.runtime.sessions import ModelFolder, Sessions
from ort_accel.runtime.weight_copies import WeightCopies

TUNING_FILE = "tuning.json"
"""The file in `engine.cache_dir` that keeps timings where `compute.tuning.results` names none."""


@dataclass
class Lowering:
    """The objects that compiling a graph uses, the same for all graphs of a model."""

    sessions: Sessions
    opset: int
    report: Report
    unwanted: frozenset[str] = frozenset()
    """Operators that PyTorch runs because the user says so."""
    failed: Callable[[Exception], bool] = lambda _: True
    """Called when a segment failed at run time where PyTorch did not; returns whether ONNX Runtime tries it again."""
    trim_memory: Callable[[], None] = lambda: None
    """Called after compiling."""
    before_segments: Callable[[], None] = lambda: None
    """Called before each segment runs."""
    for_speed: bool = True
    """PyTorch runs the operators that it runs faster; otherwise ONNX Runtime runs all that it can."""
    passes: PassOptions = field(default_factory=PassOptions)
    calls_pytorch: bool = False
    """Sessions call PyTorch's operators, so that one session runs a whole graph."""
    tuner: Tuner | None = None
    """Times each graph to choose between ONNX Runtime and PyTorch."""
    estimator: Estimator | None = None
    """Predicts times to choose between ONNX Runtime and PyTorch where there is no tuner."""
    generator: Generator | None = None
    """Generates kernels while segments run."""
    copies: WeightCopies | None = None
    """Caches autocast's casts of weights."""
    leaves: GradientRelease | None = None
    """Gives parameters their gradients before the backward ends."""
    assigner: NodeRules = field(init=False)

    def __post_init__(self) -> None:
        self.assigner = NodeRules(self.opset, self.sessions, self.unwanted, self.for_speed)
        if self.estimator is not None:
            self.assigner.estimated = self.estimator.estimates

    def change(self, **fields: Any) -> None:
        """Replace some fields for the graphs to come."""
        vars(self).update(vars(replace(self, **fields)))

    def follow(self, settings: Settings) -> None:
        """Use these settings for the graphs to come."""
        self.change(**_session_fields(settings, self.report))


class _SessionFields(TypedDict):
    """The fields of `Lowering` that depend on the settings of sessions."""

    sessions: Sessions
    estimator: Estimator | None
    tuner: Tuner | None
    generator: Generator | None


def lowering_for(
    settings: Settings, report: Report, failed: Callable[[Exception], bool], trim_memory: Callable[[], None]
) -> Lowering:
    """Returns a model's `Lowering`."""
    config = settings.config
    releases_early = config.memory.early_gradient_release and not settings.zero3
    frees_before_segments = config.memory.budget is not None and not settings.place.is_cuda
    return Lowering(
        opset=settings.opset,
        report=report,
        unwanted=frozenset(config.engine.run_in_pytorch),
        failed=failed,
        trim_memory=trim_memory,
        for_speed=config.compute.placement != "onnxruntime",
        calls_pytorch=settings.calls_pytorch,
        passes=settings.passes,
        copies=_weight_copies(settings, report),
        leaves=GradientRelease(report) if releases_early else None,
        before_segments=TrimOnGrowth() if frees_before_segments else lambda: None,
        **_session_fields(settings, report),
    )


def _session_fields(settings: Settings, report: Report) -> _SessionFields:
    compute, machine = settings.config.compute, Machine(settings.session, settings.opset)
    tuned = compute.tuning.enabled
    is_timed, sessions = settings.times_operators, _sessions(settings, report)
    is_estimated = is_timed and not tuned
    return {
        "sessions": sessions,
        "estimator": Estimator(machine, TimedMatmuls(machine), settings.calls_pytorch) if is_estimated else None,
        "tuner": _tuner(settings, sessions.without_trace(), report) if tuned else None,
        "generator": generator_for(settings, sessions, report),
    }


def _sessions(settings: Settings, report: Report) -> Sessions:
    engine, runtime = settings.config.engine, settings.runtime
    saved_models = ModelFolder(engine.save_onnx, engine.onnx_prefix) if engine.save_onnx else None
    if (folder := engine.cache_dir) is None:
        return Sessions(settings.session, folder=saved_models)
    keys = ModelKeys(f"{runtime.distribution} {runtime.version}\ntorch {torch.__version__}\n{settings.session}")
    cache, journal = ModelCache(folder, keys, report), CrashJournal(folder, keys, report)
    return Sessions(settings.session, cache, saved_models, journal)


def _tuner(settings: Settings, sessions: Sessions, report: Report) -> Tuner:
    wish, folder = settings.config.compute.tuning, settings.config.engine.cache_dir
    path = folder / TUNING_FILE if wish.results is None and folder is not None else wish.results
    results = SavedTimings(path, context_of(settings.runtime, settings.session), report)
    limit_seconds = wish.max_duration_ms / 1e3 if wish.max_duration_ms else inf
    stopwatch = Stopwatch(limit_seconds, settle=settings.place.settle)
    return Tuner(settings.opset, sessions, stopwatch, results, report, settings.session.deterministic)


def _weight_copies(settings: Settings, report: Report) -> WeightCopies | None:
    wish = settings.config.precision.cache_cast_weights
    return None if wish is False or not settings.parameters_stay else WeightCopies(wish, report)
