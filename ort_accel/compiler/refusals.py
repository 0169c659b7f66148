"""Graphs that are not compiled: those with what `engine:` forbids in a model, and those of a model that was moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ort_accel.config.sections.engine import Engine
from ort_accel.errors import OrtAccelError
from ort_accel.runtime.device import Place

FORBIDDEN_BY = {
    "autograd_function_apply": ("custom_autograd", "a torch.autograd.Function"),
    "tag_activation_checkpoint": ("allow_checkpoint", "torch.utils.checkpoint"),
}
"""Names of Dynamo's higher-order operators: the switch that forbids each, and what a user calls it."""


def refuse_forbidden(module: fx.GraphModule, engine: Engine) -> None:
    """Raise if a captured graph holds what the configuration does not allow, with every place where it does."""
    found = [
        f"  engine.{switch} is false, and the model uses {what}{_place(node)}"
        for node in _nodes(module)
        for switch, what in [FORBIDDEN_BY.get(getattr(node.target, "__name__", ""), ("", ""))]
        if switch and not getattr(engine, switch)
    ]
    if found:
        raise OrtAccelError("the model cannot run as configured:\n" + "\n".join(dict.fromkeys(found)))


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def _place(node: fx.Node) -> str:
    """The user's line that made a node."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    return f", in {places[-1].removeprefix('File ')}" if places else ""


def refuse_moved(inputs: Sequence[Any], place: Place) -> None:
    """Raise if a model was moved to a CUDA device after it was set up for another one."""
    devices = {item.device for item in inputs if isinstance(item, torch.Tensor) and item.is_cuda} - {place.device}
    if devices:
        raise OrtAccelError(
            f"the model was set up for the {place} and is called with tensors on {', '.join(map(str, devices))}; "
            "move it before ort_accel.accelerate(model), or call that again after moving it"
        )


def has_no_memory(inputs: Sequence[Any]) -> bool:
    """True if a weight or an input is on the meta device. Eager mode says then what cannot be done with it."""
    return any(isinstance(item, torch.Tensor) and item.device.type == "meta" for item in inputs)
