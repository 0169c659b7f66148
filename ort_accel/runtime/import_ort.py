"""The import of onnxruntime without its side effects on torch, DeepSpeed and logging.

onnxruntime-training 1.19 tries to load a front end of its own, which fails beside a current torch. Before it fails, the
front end imports DeepSpeed, which is slow and prints, wraps torch's functions, and adds a handler to the root logger.
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
    """Hide DeepSpeed from imports, unless the script has imported it."""
    if "deepspeed" in sys.modules:
        yield
        return
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["deepspeed"]


def restore_checkpoint_functions() -> None:
    """Restore torch's and DeepSpeed's `checkpoint`, which the front end of onnxruntime-training wraps.

    Dynamo recognizes torch's function by identity, so a wrapped checkpoint would break the graph.
    """
    for name in ("torch.utils.checkpoint", "deepspeed.checkpointing"):
        if name not in sys.modules:
            continue
        names = vars(sys.modules[name])
        while names["checkpoint"].__module__.startswith("onnxruntime."):  # each failed import adds a wrapper
            names["checkpoint"] = inspect.getclosurevars(names["checkpoint"]).nonlocals["original_checkpoint"]


@contextmanager
def _without_logging_set_up() -> Iterator[None]:
    """Remove handlers that onnxruntime adds to the root logger, with which a script's `basicConfig` does nothing."""
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
