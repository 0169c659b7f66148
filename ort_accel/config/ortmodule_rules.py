"""Rules that turn the value of an ORTModule variable into keys: one for each kind of value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ort_accel.config.plan_text import read_plan_file
from ort_accel.config.tree import Plain


@dataclass(frozen=True)
class Setting:
    """A key that takes over from a variable."""

    key: str
    value: Plain
    note: str = ""
    """Differences of behaviour, if there are any."""


@dataclass(frozen=True)
class NoCounterpart:
    """The reason why a variable has no key."""

    reason: str


Outcome = Setting | NoCounterpart
Values = Mapping[str, str]
"""Each variable that is set, without the prefix."""
Rule = Callable[[str, Values], Iterable[Outcome]]
"""Takes a variable's value and all values, and returns its outcomes. A bad value is a ValueError."""


def _is_on(value: str) -> bool:
    if value.strip() not in ("0", "1"):
        raise ValueError(f"{value!r} is no switch; write 0 or 1")
    return value.strip() == "1"


def _set_to_1(name: str, values: Values) -> bool:
    return values.get(name, "").strip() == "1"


def _integer(value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not a whole number") from error


def _names(value: str, allowed: Iterable[str], *, what: str) -> set[str]:
    names = {name.strip() for name in value.replace(",", "|").split("|")}
    if unknown := sorted(names.difference(allowed)):
        raise ValueError(f"{unknown[0]!r} is no {what}; known are {', '.join(allowed)}")
    return names


def switch(key: str, *, on: bool | str = True) -> Rule:
    """Returns the rule for 0 and 1, where 1 becomes `on`."""

    def rule(value: str, _: Values) -> Iterator[Outcome]:
        yield Setting(key, on if _is_on(value) else False)

    return rule


def path(key: str, *, note: str = "") -> Rule:
    """Returns the rule for a file or folder; upstream took an empty one for none."""

    def rule(value: str, _: Values) -> Iterator[Outcome]:
        yield Setting(key, value, note) if value else NoCounterpart(_EMPTY)

    return rule


def choice(key: str, *allowed: str) -> Rule:
    def rule(value: str, _: Values) -> Iterator[Outcome]:
        if value not in allowed:
            raise ValueError(f"{value!r} is not known; write one of {', '.join(allowed)}")
        yield Setting(key, value.lower())

    return rule


def no_counterpart(reason: str) -> Rule:
    return lambda _value, _values: [NoCounterpart(reason)]


_EMPTY = "it is empty, which upstream took for not set"
_CHOICE_IS_LEFT = "it is off, which leaves the choice to `compute.attention: auto`"
_NO_COMPUTE_OPTIMIZER = "Upstream switched this off together with the compute optimizer."
_GENERATED = "compute.generated.enabled"
_NOTHING_GENERATED = "without ORTMODULE_USE_TRITON=1 upstream generated nothing"
_NOTHING_SAVED = "kernels are kept beside saved models, and ORTMODULE_SAVE_ONNX_PATH names no folder for them"
_ONNX_OPERATORS = "it lists ONNX operators; compute.generated.ops_file takes a JSON list of ATen operators"
_NO_TUNING = "without ORTMODULE_ENABLE_TUNING=1 upstream measured nothing"
_OPSETS = range(17, 26)
_FALLBACKS = (
    "FALLBACK_DISABLE",
    "FALLBACK_FORCE_TORCH_FORWARD",
    "FALLBACK_FORCE_TORCH_BACKWARD",
    "FALLBACK_UNSUPPORTED_DEVICE",
    "FALLBACK_UNSUPPORTED_DATA",
    "FALLBACK_UNSUPPORTED_TORCH_MODEL",
    "FALLBACK_UNSUPPORTED_ONNX_MODEL",
    "FALLBACK_BAD_INITIALIZATION",
)
_SKIP_CHECKS = (
    "SKIP_CHECK_DISABLED",
    "SKIP_CHECK_DEVICE",
    "SKIP_CHECK_BUILD_GRADIENT",
    "SKIP_CHECK_EXECUTION_AGENT",
)


def fallback(value: str, _: Values) -> Iterator[Outcome]:
    if "FALLBACK_DISABLE" in _names(value, _FALLBACKS, what="fallback policy"):
        yield Setting("engine.fallback", "error")
    else:
        note = "Kinds of failure are not told apart here: PyTorch runs just the parts that ONNX Runtime cannot."
        yield Setting("engine.fallback", "warn", note)


def fallback_retry(value: str, _: Values) -> Iterator[Outcome]:
    yield Setting("engine.fallback_retry", value.lower() in ("true", "1", "yes"))


def opset(value: str, _: Values) -> Iterator[Outcome]:
    opset = _integer(value)
    if opset in _OPSETS:
        yield Setting("engine.opset", opset)
    elif 0 < opset < _OPSETS[0]:
        yield NoCounterpart(f"the oldest operator set is {_OPSETS[0]}; left to `auto`, the newest that the runtime has")
    else:
        raise ValueError(f"{value!r} is no operator set; write one from {_OPSETS[0]} to {_OPSETS[-1]}")


def checkpoint(value: str, values: Values) -> Iterator[Outcome]:
    allowed = _is_on(value)
    note = "Upstream passed over gradient checkpointing at this memory level; here a model that uses it is refused."
    yield Setting("engine.allow_checkpoint", allowed, "" if allowed or not _recomputes_layers(values) else note)


def skip_checks(value: str, _: Values) -> Iterator[Outcome]:
    _names(value, _SKIP_CHECKS, what="check")
    yield NoCounterpart("a changed model is always noticed; without its checks, upstream went on with the old one")


def compute_optimizer(value: str, _: Values) -> Iterator[Outcome]:
    enabled = _is_on(value)
    yield Setting("compute.upstream", enabled)
    if not enabled:
        yield Setting("density.labels", False, _NO_COMPUTE_OPTIMIZER)
        yield Setting("density.padding", False, _NO_COMPUTE_OPTIMIZER)


def sparsity(key: str) -> Rule:
    """Returns the rule for 0 and 1, where 1 becomes `auto`, and counts only beside the compute optimizer."""

    def rule(value: str, values: Values) -> Iterator[Outcome]:
        enabled = _is_on(value)
        if values.get("ENABLE_COMPUTE_OPTIMIZER", "").strip() == "0":
            yield Setting(key, False, _NO_COMPUTE_OPTIMIZER)
        else:
            yield Setting(key, "auto" if enabled else False)

    return rule


def attention(value: str, values: Values) -> Iterator[Outcome]:
    yield _chosen_attention(values) if _is_on(value) else NoCounterpart(_CHOICE_IS_LEFT)


def any_attention(value: str, values: Values) -> Iterator[Outcome]:
    """Upstream took any text for on, 0 too."""
    yield _chosen_attention(values) if value else NoCounterpart(_CHOICE_IS_LEFT)


def _chosen_attention(values: Values) -> Outcome:
    flash = _set_to_1("USE_FLASH_ATTENTION", values)
    efficient = _set_to_1("USE_EFFICIENT_ATTENTION", values) or bool(values.get("ATEN_SDPA_FALLBACK"))
    if flash and efficient:
        return Setting("compute.attention", "fused", "Two kernels were asked for; `fused` takes the one that fits.")
    note = "A machine without this kernel is an error here; upstream went on without it. `fused` takes any that fits."
    return Setting("compute.attention", "flash" if flash else "efficient", note)


def triton(value: str, _: Values) -> Iterator[Outcome]:
    note = "Kernels are generated on the CPU. On CUDA devices PyTorch's and ONNX Runtime's own kernels run."
    yield Setting(_GENERATED, "auto", note) if _is_on(value) else Setting(_GENERATED, False)


def triton_ops(value: str, _: Values) -> Iterator[Outcome]:
    yield NoCounterpart(_ONNX_OPERATORS if value else _EMPTY)


def triton_debug(value: str, values: Values) -> Iterator[Outcome]:
    if not _is_on(value):
        yield Setting("compute.generated.debug", False)
    elif not _set_to_1("USE_TRITON", values):
        yield NoCounterpart(_NOTHING_GENERATED)
    elif not values.get("SAVE_ONNX_PATH"):
        yield NoCounterpart(_NOTHING_SAVED)
    else:
        yield Setting("compute.generated.debug", True)


def tuning_duration(value: str, values: Values) -> Iterator[Outcome]:
    longest = 3_600_000
    asked = max(_integer(value), 0)
    if not _set_to_1("ENABLE_TUNING", values):
        yield NoCounterpart(_NO_TUNING)
        return
    note = f"Upstream was asked for {asked}; an hour is the most that is allowed."
    yield Setting("compute.tuning.max_duration_ms", min(asked, longest), note if asked > longest else "")


def tuning_results(value: str, values: Values) -> Iterator[Outcome]:
    if not value:
        yield NoCounterpart(_EMPTY)
    elif not _set_to_1("ENABLE_TUNING", values):
        yield NoCounterpart(f"{_NO_TUNING}, and what it had measured before was measured on other kernels")
    else:
        note = "Upstream was given a folder; what it saved there was measured on other kernels and is not read."
        yield Setting("compute.tuning.results", str(Path(value) / "ort_accel_tuning.json"), note)


def _recomputes_layers(values: Values) -> bool:
    return values.get("MEMORY_OPT_LEVEL", "").strip() in ("1", "2")


def memory_level(value: str, _: Values) -> Iterator[Outcome]:
    level = _integer(value)
    if level not in (0, 1, 2):
        raise ValueError(f"{value!r} is no memory level; write 0 (the plans), 1 (each layer) or 2 (and smaller copies)")
    yield Setting("memory.level", level)


def memory_plans(value: str, values: Values) -> Iterator[Outcome]:
    if not value:
        yield NoCounterpart(_EMPTY)
    elif _recomputes_layers(values):
        yield NoCounterpart("upstream passed over the plans at this memory level; for the plans, set the level to 0")
    elif plans := read_plan_file(Path(value)):
        yield Setting("memory.plans", [str(plan) for plan in plans])
    else:
        yield NoCounterpart("the file holds no plans")


def early_gradients(value: str, values: Values) -> Iterator[Outcome]:
    enabled = _is_on(value)
    if enabled and values.get("ENABLE_CUSTOM_AUTOGRAD", "").strip() == "0":
        note = "Upstream left it off without custom autograd functions; here it does not depend on them."
        yield Setting("memory.early_gradient_release", False, note)
    else:
        yield Setting("memory.early_gradient_release", enabled)
