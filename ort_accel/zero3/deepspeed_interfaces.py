"""Private interfaces of DeepSpeed's ZeRO stage 3: their names, the versions that have them, and access to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import nn

ZeroOptimizer = Any
"""DeepSpeed's optimizer of stage 3, or its offload object where nothing is trained; it has no types."""

Offload = Any
"""DeepSpeed's object that gathers and frees parameters."""

PartitionedParameter = Any
"""A parameter with the attributes that DeepSpeed gives it."""

SUPPORTED_VERSIONS = SpecifierSet(">=0.19.6,<0.20")
"""The versions of DeepSpeed that may be used; the tests run 0.19.8."""

GATHERING_LIMITS = ("prefetch_bucket_sz", "max_reuse_dist_in_numel")
"""DeepSpeed's limits for gathering ahead and for keeping gathered parameters, in elements."""

REDUCE_BUCKET_SIZE = "reduce_bucket_size"
"""The elements of gradients that DeepSpeed collects before the processes average them."""

AVERAGE_METHOD, REDUCE_SCATTER = "avg_scatter_grads", "reduce_scatter_coalesced"
"""The method of DeepSpeed's optimizer that averages gradients, and the function of its module that the method calls."""

_OFFLOAD_NAMES = (
    "_remove_module_hooks",
    "setup_zero_stage3_hooks",
    "pre_sub_module_forward_function",
    "pre_sub_module_backward_function",
    "forward_hooks",
    "backward_hooks",
)
_COORDINATOR_NAMES = (*GATHERING_LIMITS, "all_gather_params", "release_param", "inflight_param_registry")
_PARAMETER_NAMES = ("ds_status", "ds_numel", "ds_persist")


def is_partitioned(model: nn.Module) -> bool:
    """True if ZeRO stage 3 has spread the parameters of a model over the processes."""
    return any(hasattr(parameter, "ds_status") for parameter in model.parameters())


def zero_optimizer_in(*holders: object) -> ZeroOptimizer:
    """Returns ZeRO's optimizer in DeepSpeed's objects, or its offload object where nothing is trained; else None."""
    for holder in holders:
        for candidate in _unwrapped(holder):
            if hasattr(offload_of(candidate), "get_param_coordinator"):
                return candidate
    return None


def offload_of(zero: ZeroOptimizer) -> Offload:
    """Returns DeepSpeed's object that gathers and frees parameters."""
    return getattr(zero, "parameter_offload", zero)


def parameters_of(module: nn.Module) -> list[PartitionedParameter]:
    """Returns the parameters of a module with the attributes that DeepSpeed gives them."""
    return list(module.parameters())


def live_parameters(model: nn.Module) -> int:
    """Returns the number of gathered elements in this process, without the parameters that are never partitioned."""
    return sum(p.ds_numel for p in parameters_of(model) if p.ds_status.name != "NOT_AVAILABLE" and not p.ds_persist)


def missing_interfaces(zero: ZeroOptimizer, layers: Sequence[nn.Module]) -> list[str]:
    """Returns the interfaces that this room uses and the installed DeepSpeed lacks."""
    offload = offload_of(zero)
    if offload is None:
        return ["the part that gathers parameters"]
    parameter = next((parameter for layer in layers for parameter in layer.parameters()), None)
    missing = [f"DeepSpeedZeRoOffload.{name}" for name in _OFFLOAD_NAMES if not hasattr(offload, name)]
    missing += missing_private(offload.get_param_coordinator(), _COORDINATOR_NAMES)
    missing += [f"Parameter.{n}" for n in _PARAMETER_NAMES if parameter is not None and not hasattr(parameter, n)]
    if hasattr(zero, REDUCE_BUCKET_SIZE):
        module = averaging_module(zero)
        missing += missing_private(zero, [AVERAGE_METHOD])
        missing += [] if hasattr(module, REDUCE_SCATTER) else [f"{module.__name__}.{REDUCE_SCATTER}"]
    return missing


def missing_private(owner: object, names: Sequence[str]) -> list[str]:
    """Returns those of the names that are not private attributes (`__name`) of the owner's class."""
    return [f"{type(owner).__name__}.__{name}" for name in names if not hasattr(owner, mangled(owner, name))]


def mangled(owner: object, name: str) -> str:
    """Returns the name under which Python stores the private attribute `__name` of an object."""
    return f"_{_class_with(owner, name).__name__.lstrip('_')}__{name}"


def averaging_module(zero: object) -> ModuleType:
    """Returns the module in which DeepSpeed's averaging method looks up the reduce-scatter function."""
    return sys.modules[_class_with(zero, AVERAGE_METHOD).__module__]


@cache
def capture_plain_linear() -> None:
    """Capture `linear` in place of DeepSpeed's own, which saves memory that a graph does not take."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    @torch.compiler.substitute_in_graph(zero3_linear_wrap, skip_signature_check=True)
    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch._C._nn.linear(input, weight, bias)


def _unwrapped(holder: object) -> Iterator[object]:
    """Yields an engine or optimizer, the optimizer inside it, and so on."""
    while holder is not None:
        yield holder
        holder = vars(holder).get("optimizer")


def _class_with(owner: object, name: str) -> type:
    """Returns the class of an object, or the ancestor, that has the private attribute."""
    kinds = type(owner).__mro__
    return next((kind for kind in kinds if hasattr(owner, f"_{kind.__name__.lstrip('_')}__{name}")), kinds[0])
