"""Private hooks that DeepSpeed's engine puts on its model; checked with deepspeed 0.19.8."""

from __future__ import annotations

from typing import Any

from torch import nn

Engine = Any
"""DeepSpeed's engine, which has no types."""


def move_hooks_to_engine(model: nn.Module, prepared: tuple[Engine, ...]) -> None:
    """Move timers and casts from the model to DeepSpeed's engine, since hooks on the model would break its graph."""
    for engine in prepared:
        if getattr(engine, "module", None) is model and hasattr(engine, "_forward_prologue"):
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            engine.register_forward_pre_hook(_before_forward, with_kwargs=True)
            engine.register_forward_hook(_after_forward)


def _before_forward(engine: Engine, args: object, kwargs: object) -> object:
    return engine._forward_prologue(args, kwargs)


def _after_forward(engine: Engine, *_: object) -> None:
    engine._forward_epilogue()
