"""Resolves the device of a model, its execution provider, and the allocator of its memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import device, nn

from ort_accel.config import Config
from ort_accel.errors import ConfigError, OrtAccelError, Problem
from ort_accel.runtime import cuda
from ort_accel.runtime.device import CPU, ExecutionDevice
from ort_accel.runtime.installed_ort import Flavor, provider_refusal
from ort_accel.runtime.ort_distributions import exchange_commands

ALLOCATOR = "memory.external_allocator"

POOL_OPTIONS = {"gpu_mem_limit", "arena_extend_strategy"}
"""Provider options for ONNX Runtime's own memory pool."""

ASKS_FOR_CUDA: dict[str, Callable[[Config], bool]] = {
    "compute.conv_algorithm": lambda config: config.compute.conv_algorithm == "exhaustive",
    ALLOCATOR: lambda config: config.memory.external_allocator is True,
    "memory.offload": lambda config: config.memory.offload,
}
"""Keys that can be obeyed on CUDA devices alone, with the condition under which they ask for one."""


def device_of(model: nn.Module) -> device:
    """Returns the device of a model's parameters, or the CPU if there are none; raises if they are on several."""
    found = {parameter.device for parameter in model.parameters()} - {device("meta")}
    kinds = sorted({each.type for each in found})
    if "mps" in kinds:
        raise OrtAccelError("the model is on mps, where no ONNX Runtime trains; move it to the CPU: model.to('cpu')")
    if not set(kinds) <= {"cpu", "cuda"}:
        raise OrtAccelError(f"the model is on {', '.join(kinds)}; ort_accel runs models on the CPU and on CUDA devices")
    names = sorted(map(str, found))
    if len(names) > 1:
        raise OrtAccelError(f"the model is on {', '.join(names)}; move it to one device: model.to('{names[0]}')")
    return found.pop() if found else CPU.device


def place_for(config: Config, runtime: Flavor, where: device) -> ExecutionDevice:
    """Returns the place where sessions run for a model on a device; raises if the place cannot be had."""
    wish = config.engine.provider
    if wish not in ("auto", where.type):
        raise OrtAccelError(
            f"engine.provider is {wish}, but the model is on {where}; call model.to('{wish}') first, or set it to auto"
        )
    if where.type == "cpu":
        _refuse_on_cpu(config)
        return CPU
    place = ExecutionDevice("cuda", where.index or 0, _options(config))
    _refuse_without_cuda(runtime, place)
    return ExecutionDevice(place.kind, place.index, place.options, _shares_memory(config, place))


def products_are_tf32() -> bool:
    """True if PyTorch rounds operands of float32 products to TF32, which ONNX Runtime does by default."""
    return bool(torch.backends.cuda.matmul.allow_tf32)


def _options(config: Config) -> tuple[tuple[str, str], ...]:
    """Returns the provider options that the configuration asks for, as text."""
    given = {
        "cudnn_conv_algo_search": config.compute.conv_algorithm.upper(),
        "use_tf32": str(int(products_are_tf32())),  # as precise as PyTorch's products
    }
    for name, value in config.engine.provider_options.items():
        given[name] = str(int(value) if isinstance(value, bool) else value)
    return tuple(given.items())


def _refuse_on_cpu(config: Config) -> None:
    problems = [
        Problem(path, "works on cuda only, and the model is on the CPU; call model.to('cuda') first, or remove the key")
        for path, asks in ASKS_FOR_CUDA.items()
        if asks(config)
    ]
    if problems:
        raise ConfigError(problems)


def _refuse_without_cuda(runtime: Flavor, place: ExecutionDevice) -> None:
    """Raise if the CUDA provider cannot run on the model's device."""
    begin, leave = f"the model is on {place.device}, but", "or move it: model.to('cpu')"
    if cuda.PROVIDER not in runtime.providers:
        raise OrtAccelError(
            f"{begin} {runtime.distribution} {runtime.version} was built without CUDA; "
            f"{exchange_commands(runtime.distribution, 'onnxruntime-gpu')}, {leave}"
        )
    if reason := cuda.missing():
        raise OrtAccelError(f"{begin} {reason}; install a build of torch for CUDA, {leave}")
    refusal = provider_refusal(cuda.PROVIDER, {"device_id": str(place.index)} | dict(place.options))
    if refusal is not None:
        raise OrtAccelError(
            f"{begin} the CUDA provider of {runtime.distribution} {runtime.version} does not run there: {refusal}; "
            f"`ort-accel env` says what is installed; mend that or engine.provider_options, {leave}"
        )


def _shares_memory(config: Config, place: ExecutionDevice) -> bool:
    """True if ONNX Runtime takes its memory from PyTorch's allocator."""
    wish = config.memory.external_allocator
    if wish is False:
        return False
    reason = why_not_shared(place)
    if reason and wish is True:
        raise ConfigError([Problem(ALLOCATOR, f"true, but {reason}; write auto or false")])
    return not reason


def why_not_shared(place: ExecutionDevice) -> str:
    """Returns why ONNX Runtime keeps a pool of its own; empty if it need not."""
    if pool := POOL_OPTIONS & set(dict(place.options)):
        return f"engine.provider_options has {', '.join(sorted(pool))} for a pool of ONNX Runtime's own"
    if not cuda.is_on_default_stream(place.index):
        return "PyTorch computes on a stream of its own, and ONNX Runtime takes a stream or an allocator, not both"
    return ""
