"""One ONNX Runtime session for one segment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ort_accel.errors import OrtAccelError
from ort_accel.runtime.cuda import NOT_SYNCHRONIZED, PROVIDER, in_order
from ort_accel.runtime.device import CPU, Place
from ort_accel.runtime.dlpack import OrtValue, to_ort, to_torch
from ort_accel.runtime.import_ort import native as ort
from ort_accel.runtime.import_ort import onnxruntime
from ort_accel.runtime.openmp import rest_openmp

INEXACT = ["MatMulScaleFusion"]
"""Optimizations that are left out: this one keeps a float64 scale in single precision."""

SILENT = 4

SHRINKAGE, CPU_POOL = "memory.enable_memory_arena_shrinkage", "cpu:0"
"""With this, a run gives back to the system what the pool does not use any more."""

QUIET = 3
"""Log errors only: warnings about unused initializers and the like say nothing to a user."""


@dataclass(frozen=True)
class SessionSettings:
    """How sessions run; the same for all segments of a model."""

    threads: int
    optimize: bool = True
    deterministic: bool = False
    log_severity: int = field(default=QUIET, repr=False)
    """Left out of the text that names a cached model: it changes nothing in it."""
    place: Place = CPU
    """What sessions compute on."""
    whole: bool = field(default=False, repr=False)
    """On a CUDA device: refuse a model of which the CPU would have to run a part."""
    shrinks: bool = field(default=False, repr=False)
    """On the CPU: give back, behind each run, what the pool does not use. That is for a C library that joins freed
    blocks: otherwise gaps would take more than the pool gives back."""

    def options(self) -> Any:
        """The SessionOptions that these settings mean."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = self.log_severity
        options.use_deterministic_compute = self.deterministic
        level = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if self.optimize else level.ORT_DISABLE_ALL
        # Threads that wait by spinning fight with PyTorch's for the same cores: with it a BERT step on two cores took
        # 0.54 s, without 0.49 s, and 0.85 s where spinning went on after a run.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Planned blocks, each as large as all temporaries of a segment, fit badly into a pool that all segments share.
        # On a CUDA device one block for all saves the host's time, which is what small kernels wait for.
        options.enable_mem_pattern = self.place.is_cuda
        # A plan that lets one value after the other have the same memory holds it in between, too: with it a Llama of
        # four layers at memory.level 1 took 195 MiB for a step, and 156 where the pool hands memory out anew.
        options.enable_mem_reuse = self.place.is_cuda
        # One pool of memory for all sessions of the process, instead of one for each segment.
        options.add_session_config_entry("session.use_env_allocators", "1")
        # NaN and infinities must come out as eager gives them; denormals too.
        options.add_session_config_entry("session.set_denormal_as_zero", "0")
        if self.whole and self.place.is_cuda:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return options


def share_memory_pool(place: Place) -> None:
    """Register the pools that all sessions allocate from; they grow by what is asked for, not by powers of two."""
    _share("Cpu", 0)  # on any device: the CPU computes sizes, at the least
    if place.is_cuda and not place.torch_memory:
        _share("Cuda", place.index, int(dict(place.options).get("gpu_mem_limit", 0)))


_SHARED: set[tuple[str, int]] = set()
"""The devices with a pool; a second one cannot be registered."""


def _share(device: str, index: int, limit: int = 0) -> None:
    if (device, index) in _SHARED:
        return
    _SHARED.add((device, index))
    arena, default = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    memory = onnxruntime.OrtMemoryInfo(device, arena, index, default)
    growth = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1} | ({"max_mem": limit} if limit else {}))
    if device == "Cpu":
        onnxruntime.create_and_register_allocator(memory, growth)
    else:
        onnxruntime.create_and_register_allocator_v2(PROVIDER, memory, {"device_id": str(index)}, growth)


def _created(model: bytes, settings: SessionSettings, options: Any, stream: torch.cuda.Stream | None) -> Any:
    """A session; without fusions where ONNX Runtime fuses into a kernel that it lacks, as FusedMatMul in float64."""
    providers = settings.place.providers(stream, whole=settings.whole)
    how = {"providers": providers, "disabled_optimizers": INEXACT, "enable_fallback": False}
    try:
        session = onnxruntime.InferenceSession(model, options, **how)
    except ort.NotImplemented:
        level = onnxruntime.GraphOptimizationLevel
        if options.graph_optimization_level == level.ORT_DISABLE_ALL:
            raise
        options.graph_optimization_level = level.ORT_ENABLE_BASIC
        session = onnxruntime.InferenceSession(model, options, **how)
    if settings.place.is_cuda and PROVIDER not in session.get_providers():
        raise OrtAccelError("ONNX Runtime made a session on the CPU, since its CUDA provider does not load")
    return session


def _vector(values: Iterable[OrtValue]) -> Any:
    vector = ort.OrtValueVector()
    for value in values:
        vector.push_back(value)
    return vector


class Session:
    """Runs one model on torch memory."""

    def __init__(
        self,
        model: bytes,
        inputs: Sequence[str],
        outputs: Sequence[str],
        settings: SessionSettings,
        optimized_path: Path | None = None,
    ) -> None:
        """With `optimized_path`, the model as ONNX Runtime optimized it is written there."""
        share_memory_pool(settings.place)
        options = settings.options()
        if optimized_path is not None:
            options.optimized_model_filepath = str(optimized_path)
        self._stream = settings.place.stream()
        session = _created(model, settings, options, self._stream)
        self._run = session._sess.run_with_ortvaluevector
        self._session = session
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._devices = [settings.place.ort_device()] * len(outputs)
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = SILENT  # a run that fails is run by PyTorch, which says what is wrong
        if settings.shrinks:
            self._options.add_run_config_entry(SHRINKAGE, CPU_POOL)
        if settings.place.is_cuda:  # PyTorch's own work comes behind it on the same stream
            self._options.add_run_config_entry(NOT_SYNCHRONIZED, "1")
            # A run frees its pinned memory in a callback of the stream. Where that callback held the last reference to
            # the session's allocator, CUDA would be called from the callback, which ends the process.
            weakref.finalize(self, settings.place.settle)

    def __call__(self, feeds: Sequence[OrtValue], into: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Run on these inputs, in the order given at the start. Results are written into these tensors; without them
        they lie in ONNX Runtime's memory."""
        given, results = _vector(feeds), _vector(map(to_ort, into))
        with self._turn():
            self._run(self._options, self._inputs, given, self._outputs, results, self._devices)
        return list(into) or to_torch(results, len(self._outputs))

    def _turn(self) -> AbstractContextManager[None]:
        """What a run needs around it, so that it and PyTorch's own work do not get in each other's way."""
        if self._stream is not None:
            return in_order(self._stream)
        rest_openmp()
        return nullcontext()
