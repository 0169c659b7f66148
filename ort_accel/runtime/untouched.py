"""Undoing what importing onnxruntime-training (1.19) changes in other packages."""

from __future__ import annotations

import inspect
import sys


def restore_checkpoint_functions() -> None:
    """Put back torch's and DeepSpeed's `checkpoint`, for which the front end of onnxruntime-training leaves wrappers.

    Dynamo knows torch's function by identity, so that behind the wrapper every checkpoint divides the graph.
    """
    for name in ("torch.utils.checkpoint", "deepspeed.checkpointing"):
        module = sys.modules.get(name)
        while module is not None and module.__dict__["checkpoint"].__module__.startswith("onnxruntime."):
            wrapper = module.__dict__["checkpoint"]  # around another one, after an import that failed and was tried again
            module.__dict__["checkpoint"] = inspect.getclosurevars(wrapper).nonlocals["original_checkpoint"]
