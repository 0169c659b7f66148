"""One ONNX Runtime session for one segment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ort_accel.errors import OrtAccelError
from ort_accel.native.library import LIBRARY_FILE, native_library
from ort_accel.runtime.cuda import DISABLE_SYNCHRONIZATION, PROVIDER, stream_order
from ort_accel.runtime.device import CPU, ExecutionDevice
from ort_accel.runtime.dlpack import OrtValue, OrtValues, to_torch
from ort_accel.runtime.import_ort import native as ort
from ort_accel.runtime.import_ort import onnxruntime
from ort_accel.runtime.openmp import SharedCores

DISABLED_OPTIMIZERS = ["MatMulScaleFusion"]
"""Optimizers that change results: this one keeps a float64 scale in single precision."""

LOG_ERRORS, LOG_FATAL = 3, 4
"""Severities of ONNX Runtime's log. Its warnings, such as on unused initializers, are of no use to a user."""


@dataclass(frozen=True)
class SessionSettings:
    """Settings of the sessions of a model."""

    threads: int
    optimize: bool = True
    deterministic: bool = False
    log_severity: int = field(default=LOG_ERRORS, repr=False)
    """Not part of the text that names a cached model, since it does not change the model."""
    place: ExecutionDevice = CPU
    """The device that sessions compute on."""
    refuse_cpu_nodes: bool = field(default=False, repr=False)
    """On a CUDA device, refuse a model that needs the CPU for some of its nodes."""

    def options(self) -> onnxruntime.SessionOptions:
        """Returns the SessionOptions for these settings."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = self.log_severity
        options.use_deterministic_compute = self.deterministic
        level = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if self.optimize else level.ORT_DISABLE_ALL
        # Threads do not spin while they wait, since they would compete with PyTorch's threads for the cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # On the CPU each value has memory of the C library, as PyTorch's tensors have, from its first use to its last.
        # A plan or an arena would hold it longer. On a CUDA device one planned block saves the host's time, which small
        # kernels wait for, and all sessions share one arena.
        options.enable_cpu_mem_arena = False
        # Operators run in the order of the graph. By default, recomputation would run long before it is read.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        options.enable_mem_pattern = options.enable_mem_reuse = self.place.is_cuda
        if self.place.is_cuda:
            options.add_session_config_entry("session.use_env_allocators", "1")
        # NaN, infinities and denormals must equal those of eager PyTorch.
        options.add_session_config_entry("session.set_denormal_as_zero", "0")
        if native_library() is not None:
            options.register_custom_ops_library(str(LIBRARY_FILE))
        if self.refuse_cpu_nodes and self.place.is_cuda:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return options


_CORES = SharedCores()
_WITH_ARENA: set[int] = set()
"""The CUDA devices with an arena; a second one cannot be registered."""


def share_arena(place: ExecutionDevice) -> None:
    """Register the arena of all sessions on a CUDA device. It grows by the size asked for, not by powers of two."""
    if not place.is_cuda or place.torch_memory or place.index in _WITH_ARENA:
        return
    _WITH_ARENA.add(place.index)
    limit = int(dict(place.options).get("gpu_mem_limit", 0))
    arena, default = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    memory = onnxruntime.OrtMemoryInfo("Cuda", arena, place.index, default)
    growth = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1} | ({"max_mem": limit} if limit else {}))
    onnxruntime.create_and_register_allocator_v2(PROVIDER, memory, {"device_id": str(place.index)}, growth)


def _create(
    model: bytes, settings: SessionSettings, options: onnxruntime.SessionOptions, stream: torch.cuda.Stream | None
) -> onnxruntime.InferenceSession:
    """Returns an InferenceSession.

    The session has no fusions if ONNX Runtime fuses into a kernel that it lacks, such as FusedMatMul in float64.
    """
    providers = settings.place.providers(stream, refuse_cpu_nodes=settings.refuse_cpu_nodes)
    how = {"providers": providers, "disabled_optimizers": DISABLED_OPTIMIZERS, "enable_fallback": False}
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


def _vector(values: Iterable[OrtValue]) -> OrtValues:
    vector = ort.OrtValueVector()
    for value in values:
        vector.push_back(value)
    return vector


class Session:
    """An ONNX Runtime session that reads and writes torch memory."""

    def __init__(
        self,
        model: bytes,
        inputs: Sequence[str],
        outputs: Sequence[str],
        settings: SessionSettings,
        optimized_path: Path | None = None,
    ) -> None:
        """Create the session. ONNX Runtime writes its optimized model to `optimized_path`, if given."""
        share_arena(settings.place)
        options = settings.options()
        if optimized_path is not None:
            options.optimized_model_filepath = str(optimized_path)
        self._stream = settings.place.stream()
        session = _create(model, settings, options, self._stream)
        self._run = session._sess.run_with_ortvaluevector
        self._session = session
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._devices = [settings.place.ort_device()] * len(outputs)
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = LOG_FATAL  # PyTorch repeats a run that fails, and reports the error
        if settings.place.is_cuda:  # PyTorch's next work is ordered by the stream
            self._options.add_run_config_entry(DISABLE_SYNCHRONIZATION, "1")
            # A run frees its pinned memory in a callback of the stream. If that callback held the last reference to the
            # session's allocator, it would call CUDA, which ends the process. So the session waits for all runs.
            weakref.finalize(self, settings.place.settle)

    def __call__(self, feeds: Sequence[OrtValue]) -> list[torch.Tensor]:
        """Run on these inputs, in the order of `inputs`."""
        given, results = _vector(feeds), ort.OrtValueVector()
        with self._alternating_with_torch():
            self._run(self._options, self._inputs, given, self._outputs, results, self._devices)
        return to_torch(results, len(self._outputs))

    def _alternating_with_torch(self) -> AbstractContextManager[None]:
        """Returns a context for a run: in the order of a stream, or while PyTorch's threads leave the cores."""
        return _CORES.taken() if self._stream is None else stream_order(self._stream)
