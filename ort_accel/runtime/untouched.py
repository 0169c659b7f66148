"""Undoing what importing onnxruntime-training (1.19) changes in other packages."""

from __future__ import annotations

import inspect
import sys


def restore_checkpoint_functions() -> None:
    """Put back torch's and DeepSpeed's `checkpoint`, for which the front end of onnxruntime-training leaves wrappers.

    Dynamo knows torch's function by identity, so that behind the wrapper every checkpoint divides the graph.
    """
    for name in ("torch.utils.checkpoint", "deepspeed.checkpointing"):
        if name not in sys.modules:
            continue
        names = vars(sys.modules[name])
        while names["checkpoint"].__module__.startswith("onnxruntime."):  # each try of an import that fails adds one
            names["checkpoint"] = inspect.getclosurevars(names["checkpoint"]).nonlocals["original_checkpoint"]
