"""onnxruntime, imported so that nothing else changes: onnxruntime-training (1.19) tries to load a front end of its own.

That front end does not load beside a current torch, but has by then imported DeepSpeed, which writes to the standard
output and takes seconds, put wrappers around functions of others, and given the root logger a handler.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ort_accel.runtime.ort_distributions import installed_distributions, none_installed


@contextmanager
def _without_deepspeed() -> Iterator[None]:
    """Let DeepSpeed look as if it were not installed, unless the script has it already."""
    if "deepspeed" in sys.modules:
        yield
        return
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["deepspeed"]


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


@contextmanager
def _without_logging_set_up() -> Iterator[None]:
    """Leave the root logger as it was: with a handler of onnxruntime's, a script's `basicConfig` does nothing."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)


import torch  # noqa: E402, F401 - loads the CUDA libraries that onnxruntime-gpu is linked to

with _without_deepspeed(), _without_logging_set_up():
    try:
        import onnxruntime
        from onnxruntime.capi import _pybind_state as native
    except ModuleNotFoundError:
        if not installed_distributions():
            raise none_installed() from None
        raise
restore_checkpoint_functions()

__all__ = ["native", "onnxruntime"]
