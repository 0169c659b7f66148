"""Errors for configurations that this version cannot obey, and for graphs that the configuration does not allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

import torch
from torch import fx

from ort_accel.config import Config
from ort_accel.config.sections.engine import Engine
from ort_accel.errors import ConfigError, OrtAccelError, Problem
from ort_accel.graph.nodes import is_operator
from ort_accel.passes.lower_precision import MOVABLE
from ort_accel.runtime.device import ExecutionDevice

SWITCH_OF = {
    "autograd_function_apply": ("custom_autograd", "a torch.autograd.Function"),
    "tag_activation_checkpoint": ("allow_checkpoint", "torch.utils.checkpoint"),
}
"""The switch in `engine:` that forbids a higher-order operator of Dynamo, and the user's name for the operator."""


def refuse_unsupported(config: Config) -> None:
    """Raise a `ConfigError` that lists all values that this version cannot obey."""
    problems = [problem for problem in (_fixed_precision(config), _unknown_operators(config)) if problem is not None]
    if problems:
        raise ConfigError(problems)


def _fixed_precision(config: Config) -> Problem | None:
    """Returns the problem of allowing operators that must compute in float32."""
    wrong = [name for name in config.precision.cast_propagation.allow if name not in MOVABLE]
    if not wrong:
        return None
    text = f"{', '.join(wrong)} cannot be moved into the smaller type; allowed are {', '.join(MOVABLE)}"
    return Problem("precision.cast_propagation.allow", text)


def _unknown_operators(config: Config) -> Problem | None:
    """Returns the problem of naming ATen operators that do not exist."""
    names = [name for name in config.engine.run_in_pytorch if name.startswith("aten.") and not is_operator(name)]
    if not names:
        return None
    close = get_close_matches(names[0].split(".")[1], dir(torch.ops.aten), n=1)
    meant = f"; did you mean aten.{close[0]}?" if close else "; the report names operators"
    return Problem("engine.run_in_pytorch", f"PyTorch {torch.__version__} has no {', '.join(names)}{meant}")


def refuse_forbidden(module: fx.GraphModule, engine: Engine) -> None:
    """Raise if a captured graph uses what `engine:` forbids, with every line of the model that does."""
    found = [
        f"  engine.{switch} is false, and the model uses {what}{_line_of(node)}"
        for node in _nodes(module)
        for switch, what in [SWITCH_OF.get(getattr(node.target, "__name__", ""), ("", ""))]
        if switch and not getattr(engine, switch)
    ]
    if found:
        raise OrtAccelError("the model cannot run as configured:\n" + "\n".join(dict.fromkeys(found)))


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def _line_of(node: fx.Node) -> str:
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    return f", in {files[-1].removeprefix('File ')}" if files else ""


def refuse_moved(inputs: Sequence[object], place: ExecutionDevice) -> None:
    """Raise if a model was moved to a CUDA device after it was set up for another device."""
    devices = {item.device for item in inputs if isinstance(item, torch.Tensor) and item.is_cuda} - {place.device}
    if devices:
        raise OrtAccelError(
            f"the model was set up for the {place} and is called with tensors on {', '.join(map(str, devices))}; "
            "move it before ort_accel.accelerate(model), or call that again after moving it"
        )


def is_on_meta(inputs: Sequence[object]) -> bool:
    """True if a parameter or an input is on the meta device, which eager mode refuses in its own words."""
    return any(isinstance(item, torch.Tensor) and item.device.type == "meta" for item in inputs)
