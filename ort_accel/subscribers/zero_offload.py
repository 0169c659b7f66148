"""Models under DeepSpeed ZeRO stage 3 on the engine, layer by layer. What is private to DeepSpeed is used here only.

DeepSpeed gathers and frees parameters in hooks of every module. Here a layer becomes one unit of that: its parameters
are gathered before its forward and before its backward, and freed after, by DeepSpeed's own hooks around the layer's
graph. So gradients, offloading and checkpoints stay DeepSpeed's. Which layer is gathered ahead, while another one
computes, is decided here: DeepSpeed counts parameters for that, and would hold as many layers as it may. The same
holds for gradients, which it would collect for many layers before it shares them between the processes. Where they
share by gloo, each process is sent only what it has to add up.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from torch import nn
from torch.nn import functional

from ort_accel import engine
from ort_accel.compiler.layer_by_layer import kinds_of, layers_of
from ort_accel.config import Config, load_config
from ort_accel.errors import OrtAccelError
from ort_accel.subscribers.base import SubscriberBase

CHECKED = SpecifierSet(">=0.19.6,<0.20")
"""The versions of DeepSpeed that may be used; the tests run 0.19.8."""

FEATURE = "distributed.zero3"

_LIMITS = ("prefetch_bucket_sz", "max_reuse_dist_in_numel")
"""Limits of DeepSpeed's own gathering ahead and keeping. Both are 0 here: that is done by layers."""

_BUCKET = "reduce_bucket_size"
"""How many numbers of gradients DeepSpeed collects before it shares them. Here it is those of one layer at most."""

_SHARE, _REDUCE_SCATTER = "avg_scatter_grads", "reduce_scatter_coalesced"
"""What of DeepSpeed's optimizer shares gradients, and the function of its module that does it."""

_OF_OFFLOAD = (
    "_remove_module_hooks",
    "setup_zero_stage3_hooks",
    "pre_sub_module_forward_function",
    "pre_sub_module_backward_function",
    "forward_hooks",
    "backward_hooks",
)
_OF_COORDINATOR = (*_LIMITS, "all_gather_params", "release_param", "inflight_param_registry")
_OF_PARAMETER = ("ds_status", "ds_numel", "ds_persist")


class ZeROOffloadSubscriber(SubscriberBase):
    """Runs a model under ZeRO stage 3 on the engine, for loops of your own around DeepSpeed's engine:

        deepspeed_engine, *_ = deepspeed.initialize(model=model, ...)
        SubscriberManager().subscribe(model, [ZeROOffloadSubscriber(deepspeed_engine, "ort_accel.yaml")])

    Trainers and accelerate need none of it. A model that cannot run so stays plain, and its report says why.
    """

    def __init__(self, deepspeed_engine: Any, config: engine.ConfigSource = None) -> None:
        self._zero = zero_in(deepspeed_engine)
        self._config = config if isinstance(config, Config) else load_config(config)
        self._model: nn.Module | None = None

    def on_subscribe(self, model: nn.Module) -> None:
        if not is_partitioned(model):
            raise OrtAccelError(
                f"ZeRO stage 3 does not partition this {type(model).__name__}; give deepspeed.initialize "
                '"zero_optimization": {"stage": 3}, or call ort_accel.accelerate(model)'
            )
        accelerate_partitioned(model, self._config, self._zero)
        self._model = model

    def on_unsubscribe(self) -> None:
        if self._model is not None:
            engine.restore(self._model)


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO stage 3 has spread the parameters of a model over the processes."""
    return any(hasattr(parameter, "ds_status") for parameter in model.parameters())


def zero_in(*holders: Any) -> Any:
    """ZeRO's optimizer, or what only gathers where nothing is trained: in an engine or an optimizer, wrapped or not."""
    for holder in holders:
        for candidate in _unwrapped(holder):
            if hasattr(_offload_of(candidate), "get_param_coordinator"):
                return candidate
    return None


def accelerate_partitioned(model: nn.Module, config: Config, zero: Any) -> None:
    """Run a model under ZeRO stage 3 on the engine, in place. Where that cannot be, it stays plain, and it is said why.

    `zero` is what `zero_in` found. A second call with an equal configuration changes nothing.
    """
    if engine.runs_by_layers(model) and engine.config_of(model) == config:
        return
    engine.restore(model)
    layers = layers_of(model)
    reason = _reason_to_decline(config, zero, layers)
    if reason:
        engine.decline(model, config, reason)
        return
    largest = max(sum(parameter.ds_numel for parameter in _parameters(layer)) for layer in layers)
    gathering = _Gathering(zero, layers, largest)
    engine.accelerate_layers(model, config, layers, undo=gathering.undo, zero3=True)
    how = f"{kinds_of(layers)} are gathered one by one, and one ahead"
    engine.report(model).applied(FEATURE, f"{how}; the largest has {largest:,} parameters")


def live_parameters(model: nn.Module) -> int:
    """How many numbers of gathered parameters this process holds, beside those that DeepSpeed never partitions."""
    return sum(p.ds_numel for p in _parameters(model) if p.ds_status.name != "NOT_AVAILABLE" and not p.ds_persist)


def _offload_of(zero: Any) -> Any:
    """What of DeepSpeed gathers and frees parameters."""
    return getattr(zero, "parameter_offload", zero)


def _parameters(module: nn.Module) -> list[Any]:
    """The parameters with what DeepSpeed knows about each."""
    return list(module.parameters())


def _unwrapped(holder: Any) -> Iterator[Any]:
    """A wrapper around an engine or an optimizer, and what is inside of it."""
    while holder is not None:
        yield holder
        holder = vars(holder).get("optimizer")


def _reason_to_decline(config: Config, zero: Any, layers: Sequence[nn.Module]) -> str:
    """Why a partitioned model stays with PyTorch; empty where it need not."""
    if config.distributed.zero3 is False:
        return "ZeRO stage 3 shards it, and distributed.zero3 is false"
    version = importlib.metadata.version("deepspeed")
    if version not in CHECKED:
        return f"ZeRO stage 3 shards it, and its layers need deepspeed {CHECKED}, not {version}"
    missing = _missing(zero, layers)
    if missing:
        return f"ZeRO stage 3 shards it, and this deepspeed {version} lacks {', '.join(missing)}"
    if not layers:
        return "ZeRO stage 3 shards it, and it has no layers that could be gathered one by one"
    leaves = {type(part).__name__ for layer in layers for part in layer.modules() if getattr(part, "_z3_leaf", False)}
    if leaves:
        return f"ZeRO stage 3 shards it, and DeepSpeed was told to gather {', '.join(sorted(leaves))} in its own way"
    return ""


def _missing(zero: Any, layers: Sequence[nn.Module]) -> list[str]:
    """What this file uses and DeepSpeed does not have."""
    offload = _offload_of(zero)
    if offload is None:
        return ["the part that gathers parameters"]
    coordinator = offload.get_param_coordinator()
    parameter = next((parameter for layer in layers for parameter in layer.parameters()), None)
    return [
        *[f"DeepSpeedZeRoOffload.{name}" for name in _OF_OFFLOAD if not hasattr(offload, name)],
        *_private_missing(coordinator, _OF_COORDINATOR),
        *[f"Parameter.{n}" for n in _OF_PARAMETER if parameter is not None and not hasattr(parameter, n)],
        *(_Sharing.missing(zero) if hasattr(zero, _BUCKET) else []),
    ]


def _private_missing(owner: Any, names: Sequence[str]) -> list[str]:
    return [f"{type(owner).__name__}.__{name}" for name in names if not hasattr(owner, _mangled(owner, name))]


def _mangled(owner: Any, name: str) -> str:
    """What Python makes of a name with two underscores in the class that has it: an object's, or one above."""
    return f"_{_class_with(owner, name).__name__.lstrip('_')}__{name}"


def _class_with(owner: Any, name: str) -> type:
    kinds = type(owner).__mro__
    return next((kind for kind in kinds if hasattr(owner, f"_{kind.__name__.lstrip('_')}__{name}")), kinds[0])


class _Gathering:
    """Lets DeepSpeed gather and free whole layers, and gathers the next one while a layer computes.

    What comes next is what came next the last time: of the forward, of the backward, of a layer that is computed again.
    """

    def __init__(self, zero: Any, layers: Sequence[nn.Module], largest: int) -> None:
        _capture_plain_linear()
        self._offload = offload = _offload_of(zero)
        self._coordinator = offload.get_param_coordinator()
        self._layers = tuple(layers)
        self._following: dict[_Moment, nn.Module] = {}
        self._latest: _Moment | None = None
        self._ahead: nn.Module | None = None
        self._changed: list[tuple[Any, str, int]] = []
        for name in _LIMITS:
            self._lower(self._coordinator, _mangled(self._coordinator, name), 0)
        self._sharing = None
        if hasattr(zero, _BUCKET):  # an optimizer, so there are gradients
            self._lower(zero, _BUCKET, largest)
            self._sharing = _Sharing(zero)
        self._hook_anew(whole=True)
        offload.pre_sub_module_forward_function = self._before_forward
        offload.pre_sub_module_backward_function = self._before_backward

    def undo(self) -> None:
        """Leave everything as DeepSpeed had it."""
        del self._offload.pre_sub_module_forward_function, self._offload.pre_sub_module_backward_function
        for owner, name, value in self._changed:
            setattr(owner, name, value)
        if self._sharing is not None:
            self._sharing.undo()
        self._hook_anew(whole=False)

    def _lower(self, owner: Any, name: str, most: int) -> None:
        """Set a limit of DeepSpeed to `most` where it is higher."""
        value = getattr(owner, name)
        self._changed.append((owner, name, value))
        setattr(owner, name, min(value, most))

    def _private(self, name: str) -> Any:
        """Something of DeepSpeed's coordinator."""
        return getattr(self._coordinator, _mangled(self._coordinator, name))

    def _hook_anew(self, whole: bool) -> None:
        """Let DeepSpeed put its hooks on the model again: on layers as a whole, or on all of their parts."""
        offload = self._offload
        for layer in self._layers:
            vars(layer)["_z3_leaf"] = whole
        offload._remove_module_hooks()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()
        offload.setup_zero_stage3_hooks()
        for parameter in offload.module.parameters():
            # Only engines to come would read it, to reduce the gradients of a whole layer at once.
            vars(parameter).pop("ds_z3_leaf_module", None)

    def _before_forward(self, module: nn.Module) -> None:
        if module is self._offload.module:
            self._latest = None  # between steps parameters change, and nothing may be gathered ahead
        type(self._offload).pre_sub_module_forward_function(self._offload, module)
        self._gathered(module, "again" if torch._C._current_graph_task_id() != -1 else "forward")

    def _before_backward(self, module: nn.Module) -> None:
        type(self._offload).pre_sub_module_backward_function(self._offload, module)
        self._gathered(module, "backward")

    @torch.no_grad()
    def _gathered(self, module: nn.Module, phase: str) -> None:
        """A module's parameters are here; begin to gather what came after it the last time."""
        if not getattr(module, "_z3_leaf", False):
            return
        if self._ahead is not None and self._ahead is not module:
            self._free(self._ahead)
        moment = (module, phase)
        if self._latest is not None:
            self._following[self._latest] = module
        self._latest, self._ahead = moment, self._following.get(moment)
        if self._ahead is not None:
            wanted = [p for p in _parameters(self._ahead) if p.ds_status.name == "NOT_AVAILABLE"]
            self._private("all_gather_params")(wanted, phase != "backward")

    def _free(self, layer: nn.Module) -> None:
        """Give back what was gathered for a layer that did not come."""
        in_flight = self._private("inflight_param_registry")
        for parameter in layer.parameters():
            if parameter in in_flight:
                in_flight.pop(parameter).wait()
                self._private("release_param")(parameter)


_Moment = tuple[nn.Module, str]
"""A layer, and in what phase of a step its parameters were needed."""


class _Sharing:
    """Lets DeepSpeed's optimizer share gradients by `_averaged_parts`, for this optimizer alone."""

    def __init__(self, zero: Any) -> None:
        self._zero, self._module = zero, self._module_of(zero)
        self._method = getattr(zero, _mangled(zero, _SHARE))
        self._function = getattr(self._module, _REDUCE_SCATTER)
        setattr(zero, _mangled(zero, _SHARE), self._share)

    def undo(self) -> None:
        delattr(self._zero, _mangled(self._zero, _SHARE))

    @staticmethod
    def missing(zero: Any) -> list[str]:
        """What of it this DeepSpeed does not have."""
        module = _Sharing._module_of(zero)
        functions = [] if hasattr(module, _REDUCE_SCATTER) else [f"{module.__name__}.{_REDUCE_SCATTER}"]
        return _private_missing(zero, [_SHARE]) + functions

    @staticmethod
    def _module_of(zero: Any) -> ModuleType:
        """Where DeepSpeed's method looks up the function."""
        return sys.modules[_class_with(zero, _SHARE).__module__]

    def _share(self, *given: Any, **named: Any) -> Any:
        # The function is another one for the time of this call: other optimizers of this process share as they did.
        setattr(self._module, _REDUCE_SCATTER, partial(_averaged_parts, self._function))
        try:
            return self._method(*given, **named)
        finally:
            setattr(self._module, _REDUCE_SCATTER, self._function)


@torch.no_grad()
def _averaged_parts(usual: Any, gradients: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """This process's part of each gradient, averaged over all processes.

    gloo's own reduce-scatter takes longer than adding up everything on every process. Where gloo is what shares, each
    process is sent just what it has to add up: 16 MiB of gradients take two processes 10 ms instead of 35.
    """
    processes = dist.get_world_size(group)
    if processes == 1 or dist.get_backend(group) != "gloo":
        return usual(gradients, group)  # type: ignore[no-any-return]
    sizes = [-(-g.numel() // processes) for g in gradients]
    outgoing = torch.cat(
        [
            functional.pad(g.view(-1), (0, size * processes - g.numel())).view(processes, size)
            for g, size in zip(gradients, sizes, strict=True)
        ],
        dim=1,
    )
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    rank = dist.get_rank(group)
    return [
        part[: max(g.numel() - rank * size, 0)]
        for part, g, size in zip(torch.split(incoming.mean(0), sizes), gradients, sizes, strict=True)
    ]


@cache
def _capture_plain_linear() -> None:
    """Capture `linear` where DeepSpeed has its own, which exists to save memory that a graph does not take."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    @torch.compiler.substitute_in_graph(zero3_linear_wrap, skip_signature_check=True)
    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch._C._nn.linear(input, weight, bias)
