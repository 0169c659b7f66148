"""Gathering of whole layers, one ahead, by DeepSpeed's own hooks around each layer's graph.

DeepSpeed gathers and frees the parameters of every module in hooks. Here a layer is the unit: its parameters are
gathered before its forward and its backward, and freed after both. Gradients, offloading and checkpoints stay
DeepSpeed's. DeepSpeed's own prefetching counts parameters and would hold several layers, so it is turned off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from ort_accel.zero3.deepspeed_interfaces import (
    GATHERING_LIMITS,
    REDUCE_BUCKET_SIZE,
    ZeroOptimizer,
    mangled,
    offload_of,
    parameters_of,
)
from ort_accel.zero3.gradient_averaging import GradientAveraging

Phase = Literal["forward", "recompute", "backward"]
LayerPhase = tuple[nn.Module, Phase]
"""A layer, and the phase of a step that needs its parameters."""


class LayerGathering:
    """Lets DeepSpeed gather and free whole layers, and gathers the next layer while one computes.

    The next layer is the one that followed in the previous step, in the same phase.
    """

    def __init__(self, zero: ZeroOptimizer, layers: Sequence[nn.Module], largest: int) -> None:
        """`largest` is the number of elements of the largest layer."""
        self._offload = offload = offload_of(zero)
        self._coordinator = offload.get_param_coordinator()
        self._layers = tuple(layers)
        self._successors: dict[LayerPhase, nn.Module] = {}
        self._latest: LayerPhase | None = None
        self._ahead: nn.Module | None = None
        self._original_limits: list[tuple[object, str, int]] = []
        for name in GATHERING_LIMITS:
            self._limit(self._coordinator, mangled(self._coordinator, name), 0)
        self._averaging = None
        if hasattr(zero, REDUCE_BUCKET_SIZE):  # only an optimizer has gradients
            self._limit(zero, REDUCE_BUCKET_SIZE, largest)
            self._averaging = GradientAveraging(zero)
        self._replace_hooks(whole_layers=True)
        offload.pre_sub_module_forward_function = self._before_forward
        offload.pre_sub_module_backward_function = self._before_backward

    def undo(self) -> None:
        """Restore everything that was changed in DeepSpeed."""
        del self._offload.pre_sub_module_forward_function, self._offload.pre_sub_module_backward_function
        for owner, name, value in self._original_limits:
            setattr(owner, name, value)
        if self._averaging is not None:
            self._averaging.undo()
        self._replace_hooks(whole_layers=False)

    def _limit(self, owner: object, name: str, most: int) -> None:
        """Lower a limit of DeepSpeed to `most`."""
        value = getattr(owner, name)
        self._original_limits.append((owner, name, value))
        setattr(owner, name, min(value, most))

    def _private(self, name: str) -> Any:
        """Returns a private attribute of DeepSpeed's coordinator."""
        return getattr(self._coordinator, mangled(self._coordinator, name))

    def _replace_hooks(self, whole_layers: bool) -> None:
        """Let DeepSpeed put its hooks on the model again, on whole layers or on all of their parts."""
        offload = self._offload
        for layer in self._layers:
            vars(layer)["_z3_leaf"] = whole_layers
        offload._remove_module_hooks()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()
        offload.setup_zero_stage3_hooks()
        for parameter in offload.module.parameters():
            # Later engines would read this mark and reduce the gradients of a whole layer at once.
            vars(parameter).pop("ds_z3_leaf_module", None)

    def _before_forward(self, module: nn.Module) -> None:
        if module is self._offload.module:
            self._latest = None  # parameters change between steps, so nothing is gathered ahead of a step
        type(self._offload).pre_sub_module_forward_function(self._offload, module)
        self._gather_next(module, "recompute" if torch._C._current_graph_task_id() != -1 else "forward")

    def _before_backward(self, module: nn.Module) -> None:
        type(self._offload).pre_sub_module_backward_function(self._offload, module)
        self._gather_next(module, "backward")

    @torch.no_grad()
    def _gather_next(self, module: nn.Module, phase: Phase) -> None:
        """Begin to gather the layer that followed this one in the previous step."""
        if not getattr(module, "_z3_leaf", False):
            return
        if self._ahead is not None and self._ahead is not module:
            self._free(self._ahead)
        current = (module, phase)
        if self._latest is not None:
            self._successors[self._latest] = module
        self._latest, self._ahead = current, self._successors.get(current)
        if self._ahead is not None:
            partitioned = [p for p in parameters_of(self._ahead) if p.ds_status.name == "NOT_AVAILABLE"]
            self._private("all_gather_params")(partitioned, phase != "backward")

    def _free(self, layer: nn.Module) -> None:
        """Free the parameters of a layer that was gathered ahead and not called."""
        in_flight = self._private("inflight_param_registry")
        for parameter in layer.parameters():
            if parameter in in_flight:
                in_flight.pop(parameter).wait()
                self._private("release_param")(parameter)
