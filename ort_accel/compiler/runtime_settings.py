"""Which onnxruntime, threads and operator set a model runs with, from the configuration and what is there."""

from __future__ import annotations

import math

import torch

from ort_accel.autotune.cost_model import Estimator
from ort_accel.autotune.throughput import Machine
from ort_accel.autotune.time_attention import Attention
from ort_accel.autotune.time_matmuls import Products
from ort_accel.autotune.timer import Results, Stopwatch, context_of
from ort_accel.autotune.tuner import Tuner
from ort_accel.compiler.device_placement import products_are_tf32
from ort_accel.config import Config
from ort_accel.errors import OrtAccelError
from ort_accel.memory.malloc_settings import joins_freed_blocks
from ort_accel.observe.logs import severity
from ort_accel.reporting import Report
from ort_accel.runtime.device import CPU, Place
from ort_accel.runtime.installed_ort import Flavor, installed_runtime
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions

OPSET = 20
"""The newest operator set that the lowerings are written for."""

TUNING_FILE = "tuning.json"
"""Keeps measurements in `engine.cache_dir` where no other file is named."""


def chosen_runtime(config: Config) -> Flavor:
    """The installed runtime, if it is the one that the configuration asks for."""
    runtime, wish = installed_runtime(), config.engine.runtime
    is_training = wish == "onnxruntime-training"
    if wish != "auto" and is_training != runtime.is_training_build:
        extra = "training" if is_training else "cpu"
        raise OrtAccelError(
            f"engine.runtime is {wish}, but {runtime.distribution} {runtime.version} is installed; "
            f'`pip uninstall -y {runtime.distribution}` and then `pip install "ort-accel[{extra}]"`, or set it to auto'
        )
    return runtime


def settings_followed() -> tuple[object, ...]:
    """PyTorch's settings that sessions follow. Where one changes, Dynamo captures anew."""
    return torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), products_are_tf32()


def session_settings(config: Config, place: Place = CPU) -> SessionSettings:
    """How sessions run."""
    engine = config.engine
    threads = torch.get_num_threads() if engine.threads == "auto" else engine.threads
    wish = engine.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled() if wish == "auto" else wish
    return SessionSettings(
        threads=threads,
        optimize=config.compute.fusions is not False,
        deterministic=deterministic,
        log_severity=severity(config.observe.log_level),
        place=place,
        shrinks=config.memory.frugal and not place.is_cuda and joins_freed_blocks(),
    )


def opset(config: Config, runtime: Flavor) -> int:
    """The operator set of the models."""
    wish = config.engine.opset
    if wish == "auto":
        return min(runtime.newest_opset, OPSET)
    if wish > runtime.newest_opset:
        raise OrtAccelError(
            f"engine.opset is {wish}, but {runtime.distribution} {runtime.version} runs {runtime.newest_opset} at most"
        )
    return wish


def divides_alike(config: Config, settings: SessionSettings) -> bool:
    """Whether graphs must be divided without measuring: for equal bits in each run, or of what is computed again."""
    return config.compute.placement != "auto" or settings.deterministic or config.memory.saves


def _times_calls(config: Config, settings: SessionSettings) -> bool:
    return not divides_alike(config, settings) and not settings.place.is_cuda


def products(config: Config, runtime: Flavor, settings: SessionSettings, report: Report) -> Products | None:
    """What times large products, where nothing speaks against it."""
    if not _times_calls(config, settings):
        return None
    return Products(Machine(settings, opset(config, runtime)), report)


def attention(config: Config, runtime: Flavor, settings: SessionSettings, report: Report) -> Attention | None:
    """What times attention, where nothing speaks against it."""
    if not _times_calls(config, settings) or config.compute.attention != "auto":
        return None
    return Attention(Machine(settings, opset(config, runtime)), report)


def estimator(
    config: Config, runtime: Flavor, settings: SessionSettings, products: Products | None
) -> Estimator | None:
    """What estimates who is faster, where nothing speaks against it and nothing else decides."""
    if not _times_calls(config, settings) or config.compute.tuning.enabled:
        return None
    return Estimator(Machine(settings, opset(config, runtime)), products)


def tuner(config: Config, runtime: Flavor, sessions: Sessions, report: Report) -> Tuner | None:
    """What measures, where that is asked for."""
    wish, folder = config.compute.tuning, config.engine.cache_dir
    if not wish.enabled:
        return None
    path = folder / TUNING_FILE if wish.results is None and folder is not None else wish.results
    limit = wish.max_duration_ms / 1e3 if wish.max_duration_ms else math.inf
    settings = sessions.settings
    results = Results(path, context_of(runtime, settings), report)
    stopwatch = Stopwatch(limit, settle=settings.place.settle)
    return Tuner(opset(config, runtime), sessions, stopwatch, results, report, settings.deterministic)
