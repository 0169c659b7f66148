"""Values that are each allowed and cannot be had together. One function a rule; it answers with reason and way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ort_accel.config.plan_text import PlanError, read_plan_file
from ort_accel.config.schema import Config
from ort_accel.config.sections import Memory

Check = Callable[[Config], str | None]


@dataclass(frozen=True)
class Rule:
    """A check and the keys that it reads, the one that is answerable first."""

    keys: tuple[str, ...]
    check: Check


RULES: list[Rule] = []


def rule(*keys: str) -> Callable[[Check], Check]:
    """Add a function to the rules, with the keys that it reads."""

    def add(check: Check) -> Check:
        RULES.append(Rule(keys, check))
        return check

    return add


def broken(config: Config) -> Iterator[tuple[Rule, str]]:
    """Every rule that a configuration breaks, with the reason and the way out."""
    for each in RULES:
        if message := each.check(config):
            yield each, message


@rule("engine.provider_options", "engine.provider")
def _options_have_a_provider(config: Config) -> str | None:
    if config.engine.provider_options and config.engine.provider == "auto":
        return "these options belong to one provider, and engine.provider is auto; name the provider: cpu, cuda"
    return None


@rule("engine.provider_options", "engine.provider")
def _the_cpu_takes_no_options(config: Config) -> str | None:
    if config.engine.provider_options and config.engine.provider == "cpu":
        return "ONNX Runtime's CPU provider takes no options; engine.threads is the key for its threads"
    return None


OWNED_OPTIONS = {
    "device_id": "the device is the model's: model.to('cuda:1')",
    "user_compute_stream": "the stream is PyTorch's: torch.cuda.stream(...)",
    "has_user_compute_stream": "the stream is PyTorch's: torch.cuda.stream(...)",
    "gpu_external_alloc": "write memory.external_allocator",
    "gpu_external_free": "write memory.external_allocator",
    "gpu_external_empty_cache": "write memory.external_allocator",
    "cudnn_conv_algo_search": "write compute.conv_algorithm",
}
"""Options of the CUDA provider that are decided elsewhere, and where."""


@rule("engine.provider_options")
def _options_are_not_decided_elsewhere(config: Config) -> str | None:
    owned = [f"{name} ({OWNED_OPTIONS[name]})" for name in config.engine.provider_options if name in OWNED_OPTIONS]
    return f"decided elsewhere: {', '.join(owned)}; remove it here" if owned else None


def _cuda_only(key: str, wanted: Callable[[Config], bool], way_out: str) -> None:
    def check(config: Config) -> str | None:
        if wanted(config) and config.engine.provider == "cpu":
            return f"works on cuda only, and engine.provider is cpu; {way_out}, or name the provider cuda"
        return None

    rule(key, "engine.provider")(check)


_cuda_only("compute.conv_algorithm", lambda config: config.compute.conv_algorithm == "exhaustive", "write heuristic")
_cuda_only("compute.triton.enabled", lambda config: config.compute.triton.enabled is True, "write auto or false")
_cuda_only("memory.offload", lambda config: config.memory.offload, "write false")
_cuda_only("memory.external_allocator", lambda config: config.memory.external_allocator is True, "write auto or false")


@rule("compute.triton.ops_file", "compute.triton.enabled")
def _ops_file_needs_triton(config: Config) -> str | None:
    if config.compute.triton.ops_file is not None and config.compute.triton.enabled is False:
        return (
            "nothing is generated for these operators while compute.triton.enabled is false; write auto or true there"
        )
    return None


@rule("compute.triton.debug", "compute.triton.enabled")
def _debug_needs_triton(config: Config) -> str | None:
    if config.compute.triton.debug and config.compute.triton.enabled is False:
        return "there are no kernels to keep while compute.triton.enabled is false; write auto or true there"
    return None


@rule("compute.triton.debug", "engine.save_onnx")
def _debug_needs_a_folder(config: Config) -> str | None:
    if config.compute.triton.debug and config.engine.save_onnx is None:
        return "kernels are kept beside the saved models, and none are saved; name a folder in engine.save_onnx"
    return None


@rule("compute.tuning.max_duration_ms", "compute.tuning.enabled")
def _duration_needs_tuning(config: Config) -> str | None:
    if config.compute.tuning.max_duration_ms and not config.compute.tuning.enabled:
        return "nothing is measured while compute.tuning.enabled is false; write true there, or remove this"
    return None


@rule("compute.tuning.results", "compute.tuning.enabled")
def _results_need_tuning(config: Config) -> str | None:
    if config.compute.tuning.results is not None and not config.compute.tuning.enabled:
        return "measurements are neither made nor used while compute.tuning.enabled is false; write true there"
    return None


@rule("precision.cast_propagation.allow", "precision.cast_propagation.level")
def _allow_needs_level_2(config: Config) -> str | None:
    casts = config.precision.cast_propagation
    if casts.allow and casts.level != 2:
        return f"used at level 2 only, and precision.cast_propagation.level is {casts.level}; write 2 there"
    return None


def _layer_level(memory: Memory) -> bool:
    return memory.level in (1, 2)


@rule("memory.plans", "memory.level")
def _level_leaves_no_plans(config: Config) -> str | None:
    if config.memory.plans and _layer_level(config.memory):
        return (
            f"memory.level {config.memory.level} decides alone and follows no plans; write level 0, or remove the plans"
        )
    return None


@rule("memory.plan_file", "memory.level")
def _level_leaves_no_plan_file(config: Config) -> str | None:
    if config.memory.plan_file is not None and _layer_level(config.memory):
        return (
            f"memory.level {config.memory.level} decides alone and follows no plans; write level 0, or remove the file"
        )
    return None


@rule("memory.plan_file", "memory.plans")
def _plans_in_one_place(config: Config) -> str | None:
    if config.memory.plan_file is not None and config.memory.plans:
        return "the file stands in place of memory.plans, and both are given; keep one of them"
    return None


@rule("memory.plan_file")
def _plan_file_is_readable(config: Config) -> str | None:
    if config.memory.plan_file is None:
        return None
    try:
        read_plan_file(config.memory.plan_file)
    except PlanError as error:
        return str(error)
    return None


@rule("memory.probe", "memory.level")
def _level_searches_with_its_own_probe(config: Config) -> str | None:
    memory = config.memory
    if _layer_level(memory) and memory.probe not in (Memory.model_fields["probe"].default, "1:1"):
        return f"memory.level {memory.level} always searches with 1:1; write level 0, or remove the probe"
    return None


@rule("memory.budget", "memory.level")
def _budget_needs_level_auto(config: Config) -> str | None:
    if config.memory.budget is not None and config.memory.level != "auto":
        return f"a budget decides what to recompute, and memory.level {config.memory.level} has; write level auto"
    return None


@rule("memory.offload", "memory.budget")
def _offload_needs_a_budget(config: Config) -> str | None:
    if config.memory.offload and config.memory.budget is None:
        return "values are moved to keep within memory.budget, and there is none; give a budget, such as 6GiB"
    return None


@rule("optimizer.step_in_backward", "optimizer.name")
def _step_in_backward_needs_our_optimizer(config: Config) -> str | None:
    if config.optimizer.step_in_backward and config.optimizer.name is None:
        return "only an optimizer that is built here can do it; write optimizer.name: adamw_ort_fused"
    return None


@rule("optimizer.step_in_backward", "memory.early_gradient_release")
def _step_in_backward_needs_early_gradients(config: Config) -> str | None:
    if config.optimizer.step_in_backward and not config.memory.early_gradient_release:
        return "each gradient must be there before the backward ends; write memory.early_gradient_release: true"
    return None


@rule("optimizer.step_in_backward", "optimizer.fp16.enabled")
def _step_in_backward_excludes_fp16(config: Config) -> str | None:
    if config.optimizer.step_in_backward and config.optimizer.fp16.enabled:
        return "an overflow is known only when all gradients are there; write false here or in optimizer.fp16.enabled"
    return None


@rule("optimizer.fp16.min_scale", "optimizer.fp16.initial_scale")
def _scale_begins_above_its_floor(config: Config) -> str | None:
    fp16 = config.optimizer.fp16
    if fp16.min_scale > fp16.initial_scale:
        return f"above optimizer.fp16.initial_scale, which is {fp16.initial_scale:g}; lower this or raise that"
    return None


@rule("observe.activation_statistics.end_step", "observe.activation_statistics.start_step")
def _recording_ends_after_it_starts(config: Config) -> str | None:
    statistics = config.observe.activation_statistics
    if statistics is None or statistics.end_step is None:
        return None
    start = statistics.start_step or 0
    if statistics.end_step <= start:
        return f"{statistics.end_step} is not after the first step, {start}, so nothing is recorded; write a later step"
    return None


@rule("observe.report_file")
def _report_has_a_known_kind(config: Config) -> str | None:
    file = config.observe.report_file
    if file is not None and file.suffix not in (".json", ".html"):
        return f"{str(file)!r} ends in neither .json (for machines) nor .html (for people); name one of these"
    return None
