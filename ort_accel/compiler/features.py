"""What this version does with every switch of the configuration. None is without effect and without a word."""

from __future__ import annotations

import platform
from collections.abc import Callable
from difflib import get_close_matches
from operator import attrgetter

import torch

import ort_accel
from ort_accel.compiler.cuda_features import NO_TRITON, record_cuda
from ort_accel.compiler.runtime_settings import divides_alike, opset
from ort_accel.config import Config
from ort_accel.config.declaration import rows
from ort_accel.errors import ConfigError, Problem
from ort_accel.passes.lower_precision import MOVABLE
from ort_accel.reporting import Report
from ort_accel.runtime.installed_ort import Flavor
from ort_accel.runtime.session import SessionSettings

UNSEEN = "no batch has been seen yet"
"""Why rows and logits are not left out before anything is known of them."""

ONE_CAST = "a tensor is cast into a type once, and not into a wider type and back"

FUSED = (
    "those of ONNX Runtime, the gradient of a cross-entropy in one tensor, and PyTorch's fused attention in single "
    "precision where its 16-bit kernels are slower"
)

TRITON: dict[str, Callable[[Config], bool]] = {
    "compute.triton.enabled": lambda config: config.compute.triton.enabled is True,
    "compute.triton.ops_file": lambda config: config.compute.triton.ops_file is not None,
    "compute.triton.debug": lambda config: config.compute.triton.debug,
}
"""Wishes for kernels that are not generated."""


def refuse_missing(config: Config) -> None:
    """Raise a `ConfigError` that lists every wish this version cannot obey."""
    problems = [problem for problem in (_immovable(config), _unknown_operators(config)) if problem is not None]
    problems += [Problem(path, f"{NO_TRITON}; remove the key") for path, wish in TRITON.items() if wish(config)]
    if problems:
        raise ConfigError(problems)


def record_features(
    config: Config, runtime: Flavor, settings: SessionSettings, report: Report, partitioned: bool = False
) -> None:
    """Write into the report what is on, off and refused.

    `partitioned` says that ZeRO stage 3 has spread the parameters of the model over several processes.
    """
    _record_zero3(config, partitioned, report)
    report.versions |= {
        "ort_accel": ort_accel.__version__,
        "torch": str(torch.__version__),
        runtime.distribution: runtime.version,
        "python": platform.python_version(),
    }
    report.config = config.to_dict()
    record_settings(config, runtime, settings, report)
    report.features |= {row.name: row for row in rows(config)}
    _record_engine(config, report)
    record_cuda(config, settings.place, report)
    _record_skipping(config, report)
    _record_memory(config, partitioned, report)


def record_settings(config: Config, runtime: Flavor, settings: SessionSettings, report: Report) -> None:
    """Write what depends on how sessions run, which follows PyTorch's settings."""
    kind = "with training kernels" if runtime.is_training_build else "without training kernels"
    how = f"{settings.place}, {settings.threads} threads, opset {opset(config, runtime)}"
    report.applied("engine", f"{runtime.distribution} {runtime.version}, {kind}, {how}")
    if settings.deterministic:
        report.applied("engine.deterministic", "the same seed gives the same bits")
    else:
        as_set = config.engine.deterministic == "auto"
        report.off("engine.deterministic", "as PyTorch is set" if as_set else "switched off")
    _record_compute(config, settings, report)
    _record_placement(config, settings, report)


def _immovable(config: Config) -> Problem | None:
    """Operators that may not compute in a smaller type."""
    wrong = [name for name in config.precision.cast_propagation.allow if name not in MOVABLE]
    if not wrong:
        return None
    text = f"{', '.join(wrong)} cannot be moved into the smaller type; allowed are {', '.join(MOVABLE)}"
    return Problem("precision.cast_propagation.allow", text)


def _unknown_operators(config: Config) -> Problem | None:
    """Names of ATen operators that there are not: PyTorch would be told to run what never comes."""
    names = [name for name in config.engine.run_in_pytorch if name.startswith("aten.") and not _is_operator(name)]
    if not names:
        return None
    close = get_close_matches(names[0].split(".")[1], dir(torch.ops.aten), n=1)
    meant = f"; did you mean aten.{close[0]}?" if close else "; the report names operators"
    return Problem("engine.run_in_pytorch", f"PyTorch {torch.__version__} has no {', '.join(names)}{meant}")


def _is_operator(name: str) -> bool:
    found: object = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


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
    unseen = "a kind of call that was checked is not checked again; changes of the model go unseen"
    _record_wish("engine.skip_checks", unseen if engine.skip_checks else "", report)


def _record_skipping(config: Config, report: Report) -> None:
    """Until the first batch shows what it has."""
    for path in ("density.labels", "density.padding", "compute.upstream", "compute.loss_only"):
        report.off(path, "switched off" if attrgetter(path)(config) is False else UNSEEN)


def _record_compute(config: Config, settings: SessionSettings, report: Report) -> None:
    casts = config.precision.cast_propagation
    if casts.level:
        moved = f"; {', '.join(casts.allow) or 'copies'} in the smaller type ({casts.strategy})"
        effect = f"{casts.level}: {ONE_CAST}{moved if casts.level == 2 else ''}"
        report.applied("precision.cast_propagation.level", effect)
    else:
        report.off("precision.cast_propagation.level", "switched off")
    is_timed = not divides_alike(config, settings) and not settings.place.is_cuda
    measured = ", for many tokens the faster one, as timed" if is_timed else ""
    ways = {
        "auto": f"as PyTorch chooses: a fused kernel, or matrix products{measured}",
        "products": "matrix products and a softmax, which ONNX Runtime runs",
    }
    wish = config.compute.attention
    report.applied("compute.attention", ways.get(wish, f"one node, which PyTorch runs ({wish})"))
    if config.compute.fusions is False:
        report.off("compute.fusions", "switched off, with all optimizations of ONNX Runtime")
    else:
        report.applied("compute.fusions", FUSED)


def _record_placement(config: Config, settings: SessionSettings, report: Report) -> None:
    wish = config.compute.placement
    if wish != "onnxruntime" and config.compute.tuning.enabled:
        report.applied("compute.placement", "PyTorch runs what compute.tuning finds that it runs faster here")
    elif wish == "onnxruntime" or settings.place.is_cuda:
        report.off("compute.placement", "ONNX Runtime runs all that it can")
    elif divides_alike(config, settings):
        report.applied("compute.placement", "PyTorch runs what figures of other machines say it runs faster")
    else:
        timed = "PyTorch runs what timed calls say it runs faster here, where a graph is large enough to time them"
        report.applied("compute.placement", timed)


def _record_memory(config: Config, partitioned: bool, report: Report) -> None:
    memory = config.memory
    _record_early_gradients(memory.early_gradient_release, partitioned, report)
    ways = {
        1: "everything within a transformer layer is computed again, its input is kept",
        2: "as level 1, and copies of a smaller type are kept where a cast was there",
    }
    if memory.level in ways:
        report.applied("memory.level", f"{memory.level}: {ways[memory.level]}")
    else:
        budgeted = "the budget decides" if memory.budget else ""
        report.off("memory.level", budgeted or "nothing is computed again but what plans or the model ask for")


def _record_early_gradients(wish: bool, partitioned: bool, report: Report) -> None:
    if wish and partitioned:
        text = "under ZeRO stage 3 each layer hands its gradients over when its own backward ends"
        report.off("memory.early_gradient_release", text)
    else:
        early = "for parameters whose gradient somebody waits for, such as an optimizer that steps in the backward"
        _record_wish("memory.early_gradient_release", early if wish else "", report)


def _record_zero3(config: Config, partitioned: bool, report: Report) -> None:
    if partitioned:
        report.applied("distributed.zero3", "layers are gathered one by one")
    elif config.distributed.zero3 is True:
        text = "true, and this model is not partitioned by ZeRO stage 3; set zero_stage: 3 for DeepSpeed, or write auto"
        raise ConfigError([Problem("distributed.zero3", text)])
    else:
        report.off("distributed.zero3", "the model is not partitioned" if config.distributed.zero3 else "switched off")


def _record_wish(path: str, effect: str, report: Report) -> None:
    if effect:
        report.applied(path, effect)
    else:
        report.off(path, "not asked for")
