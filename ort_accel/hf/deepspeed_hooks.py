"""The hooks that DeepSpeed's engine puts on a model, which are private to it; checked with deepspeed 0.19.8."""

from __future__ import annotations

from typing import Any

from torch import nn


def move_hooks_out_of(model: nn.Module, prepared: tuple[Any, ...]) -> None:
    """Let timers and casts of an engine run around the call of its model; inside, they would divide the graph."""
    for engine in prepared:
        if getattr(engine, "module", None) is model and hasattr(engine, "_forward_prologue"):
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            engine.register_forward_pre_hook(_before, with_kwargs=True)
            engine.register_forward_hook(_after)


def _before(engine: Any, inputs: Any, named: Any) -> Any:
    return engine._forward_prologue(inputs, named)


def _after(engine: Any, *_: Any) -> None:
    engine._forward_epilogue()
