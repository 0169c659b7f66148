"""Records in the report what each switch of the configuration does: applied, off or refused."""

from __future__ import annotations

import platform
from functools import cache
from operator import attrgetter

import torch

import ort_accel
from ort_accel.compiler.device_placement import why_not_shared
from ort_accel.compiler.generated_kernels import ON_CUDA, record_generated
from ort_accel.compiler.settings import Settings
from ort_accel.config import Config
from ort_accel.config.declaration import rows
from ort_accel.errors import ConfigError, Problem
from ort_accel.native.library import native_status
from ort_accel.observe.logs import configure, say
from ort_accel.reporting.report import Report

UNSEEN = "no batch has been seen yet"
"""The reason why rows and logits are not left out before the first batch."""

ON_CPU = "for CUDA devices; the model is on the CPU"

ONE_CAST = "a tensor is cast into a type once, and not into a wider type and back"

FUSED = (
    "those of ONNX Runtime, the gradient of a cross-entropy in one tensor, and PyTorch's fused attention in single "
    "precision where its 16-bit kernels are slower"
)


def record_features(settings: Settings, report: Report) -> None:
    """Record all switches, the configuration and the versions of what is installed."""
    config, runtime = settings.config, settings.runtime
    _record_zero3(settings, report)
    report.versions |= {
        "ort_accel": ort_accel.__version__,
        "torch": str(torch.__version__),
        runtime.distribution: runtime.version,
        "python": platform.python_version(),
    }
    report.config = config.to_dict()
    record_settings(settings, report)
    report.features |= {row.name: row for row in rows(config)}
    _record_native(settings, report)
    record_generated(settings, report)
    _record_engine(config, report)
    _record_cuda(settings, report)
    _record_skipping(config, report)
    _record_memory(settings, report)


def record_settings(settings: Settings, report: Report) -> None:
    """Record the switches that depend on PyTorch's settings."""
    runtime = settings.runtime
    kind = "with training kernels" if runtime.is_training_build else "without training kernels"
    how = f"{settings.session.place}, {settings.session.threads} threads, opset {settings.opset}"
    report.applied("engine", f"{runtime.distribution} {runtime.version}, {kind}, {how}")
    if settings.session.deterministic:
        report.applied("engine.deterministic", "the same seed gives the same bits")
    else:
        as_set = settings.config.engine.deterministic == "auto"
        report.off("engine.deterministic", "as PyTorch is set" if as_set else "switched off")
    _record_compute(settings, report)
    _record_placement(settings, report)


def _record_native(settings: Settings, report: Report) -> None:
    config, status = settings.config, native_status()
    if config.compute.native and not settings.calls_pytorch:
        report.off("compute.native", ON_CUDA if settings.place.is_cuda else status.missing)
    if status.missing:
        report.refused("native library", status.missing)
        configure(config.observe.log_level)
        _say_once(f"there are no kernels of ort_accel's own, because the native library is missing: {status.missing}")
    else:
        report.applied("native library", str(status))


@cache
def _say_once(text: str) -> None:
    """Log a line that would be the same for every model of a process."""
    say(text)


def _record_engine(config: Config, report: Report) -> None:
    engine = config.engine
    shapes = {
        "auto": "a size stays open once it was seen to change, or a data loader tells that it will",
        True: "all sizes are open from the start",
    }
    if engine.dynamic_shapes is False:
        report.off("engine.dynamic_shapes", "each shape is compiled on its own")
    else:
        report.applied("engine.dynamic_shapes", shapes[engine.dynamic_shapes])
    if engine.fallback == "error":
        report.off("engine.fallback", "what ONNX Runtime cannot run is an error")
    else:
        where = "in the log and here" if engine.fallback == "warn" else "here"
        report.applied("engine.fallback", f"PyTorch runs what ONNX Runtime cannot, and it is said {where}")


def _record_skipping(config: Config, report: Report) -> None:
    """Record them as off; the first batch decides."""
    for path in ("density.labels", "density.padding", "compute.upstream", "compute.loss_only"):
        report.off(path, "switched off" if attrgetter(path)(config) is False else UNSEEN)


def _record_compute(settings: Settings, report: Report) -> None:
    config = settings.config
    casts = config.precision.cast_propagation
    if casts.level:
        moved = f"; {', '.join(casts.allow) or 'copies'} in the smaller type ({casts.strategy})"
        effect = f"{casts.level}: {ONE_CAST}{moved if casts.level == 2 else ''}"
        report.applied("precision.cast_propagation.level", effect)
    else:
        report.off("precision.cast_propagation.level", "switched off")
    ways = {
        "auto": "as PyTorch chooses: a fused kernel, or matrix products",
        "products": "matrix products and a softmax, which ONNX Runtime runs",
    }
    wish = config.compute.attention
    report.applied("compute.attention", ways.get(wish, f"one node, which PyTorch runs ({wish})"))
    if config.compute.fusions is False:
        report.off("compute.fusions", "switched off, with all optimizations of ONNX Runtime")
    else:
        report.applied("compute.fusions", FUSED)


def _record_placement(settings: Settings, report: Report) -> None:
    wish = settings.config.compute.placement
    runs = "sessions call PyTorch's kernels for" if settings.calls_pytorch else "PyTorch runs"
    if wish != "onnxruntime" and settings.config.compute.tuning.enabled:
        report.applied("compute.placement", f"{runs} what compute.tuning finds to be faster there")
    elif wish == "onnxruntime" or settings.place.is_cuda:
        report.off("compute.placement", "ONNX Runtime runs all that it can")
    elif not settings.times_operators:
        report.applied("compute.placement", f"{runs} what was faster there on other machines")
    else:
        timed = "what timed calls say is faster there, where a graph is large enough to time them"
        report.applied("compute.placement", f"{runs} {timed}")


def _record_memory(settings: Settings, report: Report) -> None:
    memory = settings.config.memory
    _record_early_gradients(memory.early_gradient_release, settings.zero3, report)
    ways = {
        1: "everything within a transformer layer is computed again, its input is kept",
        2: "as level 1, and copies of a smaller type are kept where a cast was there",
    }
    if memory.level in ways:
        report.applied("memory.level", f"{memory.level}: {ways[memory.level]}")
    else:
        budgeted = "the budget decides" if memory.budget else ""
        report.off("memory.level", budgeted or "nothing is computed again but what plans or the model ask for")


def _record_early_gradients(wish: bool, zero3: bool, report: Report) -> None:
    if wish and zero3:
        text = "under ZeRO stage 3 each layer hands its gradients over when its own backward ends"
        report.off("memory.early_gradient_release", text)
    else:
        early = "for parameters whose gradient somebody waits for, such as an optimizer that steps in the backward"
        _record_wish("memory.early_gradient_release", early if wish else "", report)


def _record_zero3(settings: Settings, report: Report) -> None:
    wish = settings.config.distributed.zero3
    if settings.zero3:
        report.applied("distributed.zero3", "layers are gathered one by one")
    elif wish is True:
        text = "true, and this model is not partitioned by ZeRO stage 3; set zero_stage: 3 for DeepSpeed, or write auto"
        raise ConfigError([Problem("distributed.zero3", text)])
    else:
        report.off("distributed.zero3", "the model is not partitioned" if wish else "switched off")


def _record_wish(path: str, effect: str, report: Report) -> None:
    if effect:
        report.applied(path, effect)
    else:
        report.off(path, "not asked for")


def _record_cuda(settings: Settings, report: Report) -> None:
    compute, given, is_cuda = settings.config.compute, settings.config.engine.provider_options, settings.place.is_cuda
    options = ", ".join(f"{name} {value}" for name, value in given.items())
    _record_wish("engine.provider_options", options, report)
    if is_cuda:
        report.applied("compute.conv_algorithm", f"cuDNN searches for kernels: {compute.conv_algorithm}")
    else:
        report.off("compute.conv_algorithm", ON_CPU)
    _record_allocator(settings, report)


def _record_allocator(settings: Settings, report: Report) -> None:
    path = "memory.external_allocator"
    if settings.place.torch_memory:
        report.applied(path, "ONNX Runtime takes its memory from PyTorch's allocator")
    elif not settings.place.is_cuda:
        report.off(path, ON_CPU)
    elif settings.config.memory.external_allocator is False:
        report.off(path, "switched off")
    else:
        report.refused(path, why_not_shared(settings.place))
