"""Decides if kernels are generated for a model (`compute.generated`), and makes the generator."""

from __future__ import annotations

import json
from pathlib import Path

from ort_accel.compiler.settings import Settings
from ort_accel.errors import ConfigError, Problem
from ort_accel.generated.builds import why_no_code
from ort_accel.generated.takeover import FEATURE, Generator, GeneratorSettings
from ort_accel.generated.trial import CLUSTERS, PROGRAM
from ort_accel.graph.nodes import is_operator
from ort_accel.reporting.report import Report
from ort_accel.runtime.sessions import Sessions

ON_CUDA = "for the CPU; the model is on a CUDA device"
NOT_YET = "no segment has run for long enough yet"

DELAY_SECONDS = {CLUSTERS: 10.0, PROGRAM: 120.0}
"""With `auto`, the time that segments run for before code of each kind is compiled for them, one after the other.
Programs take about as long to compile where training keeps the processor busy."""

LEAST_SHARE = 0.01
"""With `auto`, the share of a segment's time that generated kernels must be able to save."""


def why_none(settings: Settings) -> str:
    """Returns the reason why no kernels can be generated for a model; empty if they can."""
    config = settings.config
    reasons = {
        "switched off": config.compute.generated.enabled is False,
        ON_CUDA: settings.place.is_cuda,
        "compute.native is off": not settings.calls_pytorch,
        "steps must give the same bits": settings.session.deterministic,
        "the memory of a step is predicted for the operators as they are": (
            config.memory.budget is not None and config.compute.generated.enabled == "auto"
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "") or why_no_code()


def record_generated(settings: Settings, report: Report) -> None:
    """Record if kernels are generated. Raises a `ConfigError` if they are asked for and cannot be."""
    reason = why_none(settings)
    if reason and settings.config.compute.generated.enabled is True:
        raise ConfigError([Problem(FEATURE, f"true, and no kernels can be generated: {reason}; write auto or false")])
    report.off(FEATURE, reason or NOT_YET)


def generator_for(settings: Settings, sessions: Sessions, report: Report) -> Generator | None:
    """Returns the generator of a model; None if no kernels are generated for it."""
    if why_none(settings):
        return None
    return Generator(sessions, settings.opset, report, generator_settings(settings))


def generator_settings(settings: Settings) -> GeneratorSettings:
    """Returns what is generated for a model, and when."""
    wish, engine = settings.config.compute.generated, settings.config.engine
    return GeneratorSettings(
        workers=wish.workers,
        delay_seconds=_delays(settings),
        least_share=0.0 if wish.enabled is True else LEAST_SHARE,
        operators=None if wish.ops_file is None else _operators(wish.ops_file),
        folder=engine.cache_dir,
        sources=engine.save_onnx if wish.debug else None,
    )


def _delays(settings: Settings) -> dict[str, float]:
    """Returns the ways that are tried, and how long segments run before that.

    A program of Inductor takes other memory than a plan foresees, and runs other operators than a list allows.
    """
    wish, memory = settings.config.compute.generated, settings.config.memory
    has_programs = wish.ops_file is None and memory.decides_itself and not memory.saves
    ways = [way for way in DELAY_SECONDS if way == CLUSTERS or has_programs]
    return {way: 0.0 if wish.enabled is True else DELAY_SECONDS[way] for way in ways}


def _operators(file: Path) -> frozenset[str]:
    """Returns the operators that a file lists."""
    key = "compute.generated.ops_file"
    try:
        names = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(key, f"{file}: {error}")]) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError([Problem(key, f'{file}: must be a list of operators, such as ["aten.mul.Tensor"]')])
    if unknown := [name for name in names if not is_operator(name)]:
        raise ConfigError([Problem(key, f"{file}: PyTorch has no {', '.join(unknown)}; the report names operators")])
    return frozenset(names)
