"""The pool of memory that all sessions share: emptying it, and taking memory from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy
import torch
from onnx import numpy_helper

from ort_accel.runtime.device import CPU
from ort_accel.runtime.dlpack import sizes_to_ort
from ort_accel.runtime.import_ort import onnxruntime
from ort_accel.runtime.kernel_probes import Probe, Sample
from ort_accel.runtime.session import CPU_POOL, SHRINKAGE, Session, SessionSettings, share_memory_pool

NOTHING = Probe("Identity", (Sample((1,)),), {}, ("float32",), "", 17)

ITEM_TYPES = {2: "int16", 4: "float32", 8: "float64"}
"""For an element of so many bytes, a type that ONNX Runtime fills memory with."""


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
    options.add_run_config_entry(SHRINKAGE, CPU_POOL)
    return session, options


def pooled_zeros(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros in memory that goes back to the pool when the tensor is gone."""
    zeros = _zeros(len(sizes), ITEM_TYPES[dtype.itemsize])([sizes_to_ort(sizes, scalar=False)])[0]
    return zeros if zeros.dtype == dtype else zeros.view(dtype)


@cache
def _zeros(rank: int, dtype: str) -> Session:
    """The sizes are an input: knowing them, it would make of the result a constant, which all runs share."""
    value = numpy_helper.from_array(numpy.zeros(1, dtype))
    zeros = Probe("ConstantOfShape", (Sample((rank,), "int64"),), {"value": value}, (dtype,), "", 17)
    return Session(zeros.model().SerializeToString(), ["in0"], ["out0"], SessionSettings(threads=1))
