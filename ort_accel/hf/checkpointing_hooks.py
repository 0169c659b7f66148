"""Keeps the hooks that a model has for gradient checkpointing, instead of adding more at each request.

TRL switches checkpointing off and on around each call of a reference model. transformers then adds one more hook to the
input embeddings, and Dynamo, which guards the hooks of a module, compiles the model anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import PreTrainedModel


def keep_hooks() -> None:
    """Let models that have such hooks keep them, when they are asked to add some."""
    original: Callable[..., Any] = PreTrainedModel.enable_input_require_grads
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def enable(self: PreTrainedModel) -> None:
        if not _has_hooks(self):
            original(self)

    PreTrainedModel.enable_input_require_grads = enable  # type: ignore[method-assign]


def _has_hooks(model: PreTrainedModel) -> bool:
    """True if the hooks that were added last are still there, and on modules of the model."""
    kept = getattr(model, "_require_grads_hooks", ())
    of_modules = {id(module._forward_hooks) for module in model.modules()}
    places = [handle.hooks_dict_ref() for handle in kept]
    return bool(places) and all(
        place is not None and id(place) in of_modules and handle.id in place
        for handle, place in zip(kept, places, strict=True)
    )
