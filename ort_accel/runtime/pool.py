"""The pool of memory that all sessions share: emptying it, and taking memory from it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ort_accel.runtime.imported import onnxruntime
from ort_accel.runtime.kernels import Probe, Sample
from ort_accel.runtime.place import CPU
from ort_accel.runtime.session import Session, SessionSettings, share_memory_pool
from ort_accel.runtime.tensors import sizes_to_ort

NOTHING = Probe("Identity", (Sample((1,)),), {}, ("float32",), "", 17)

ZEROS = Probe("ConstantOfShape", (Sample((2,), "int64"),), {}, ("float32",), "", 17)
"""Sizes that it knew, instead of being given, would make of the result a constant, which all runs share."""


def release_unused() -> None:
    """Give back what ONNX Runtime's pool holds and nobody uses. A later run asks for it again, which takes time."""
    session, options = _shrinking()
    session.run(None, NOTHING.feeds(), options)


@cache
def _shrinking() -> tuple[Any, Any]:
    """A model that does nothing, and options with which a run shrinks the pool when it ends."""
    share_memory_pool(CPU)
    model, settings = NOTHING.model().SerializeToString(), SessionSettings(threads=1).options()
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return session, options


def pooled_zeros(rows: int, width: int) -> torch.Tensor:
    """Zeros in single precision, in memory that goes back to the pool when the tensor is gone."""
    return _zeros()([sizes_to_ort([rows, width], scalar=False)])[0]


@cache
def _zeros() -> Session:
    return Session(ZEROS.model().SerializeToString(), ["in0"], ["out0"], SessionSettings(threads=1))
