"""ONNX Runtime's memory pool, which all sessions share: releasing its unused memory, and allocating from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy
import torch
from onnx import numpy_helper

from ort_accel.runtime.device import CPU
from ort_accel.runtime.dlpack import sizes_to_ort
from ort_accel.runtime.import_ort import onnxruntime
from ort_accel.runtime.kernel_probes import Probe, Sample
from ort_accel.runtime.session import CPU_POOL, SHRINKAGE, Session, SessionSettings, share_memory_pool

IDENTITY = Probe("Identity", (Sample((1,)),), {}, ("float32",), "", 17)

TYPE_BY_ITEM_BYTES = {2: "int16", 4: "float32", 8: "float64"}
"""A type that ONNX Runtime can fill memory with, by the bytes of an element."""


def release_unused() -> None:
    """Return the pool's unused memory to the system. A later run that needs it again is slower."""
    session, options = _shrinking_session()
    session.run(None, IDENTITY.feeds(), options)


@cache
def _shrinking_session() -> tuple[onnxruntime.InferenceSession, onnxruntime.RunOptions]:
    """Returns a session that computes nothing, and options with which its run shrinks the pool."""
    share_memory_pool(CPU)
    model, settings = IDENTITY.model().SerializeToString(), SessionSettings(threads=1).options()
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(SHRINKAGE, CPU_POOL)
    return session, options


def pooled_zeros(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns zeros in memory of the pool."""
    zeros = _zeros_session(len(sizes), TYPE_BY_ITEM_BYTES[dtype.itemsize])([sizes_to_ort(sizes, scalar=False)])[0]
    return zeros if zeros.dtype == dtype else zeros.view(dtype)


@cache
def _zeros_session(rank: int, dtype: str) -> Session:
    """Returns a session that makes zeros. The sizes are an input: constant zeros would be shared by all runs."""
    value = numpy_helper.from_array(numpy.zeros(1, dtype))
    zeros = Probe("ConstantOfShape", (Sample((rank,), "int64"),), {"value": value}, (dtype,), "", 17)
    return Session(zeros.model().SerializeToString(), ["in0"], ["out0"], SessionSettings(threads=1))
