"""ONNX Runtime on a CUDA device beside PyTorch: on the same stream, and optionally in the same memory.

One stream orders the work of both, so neither waits on the host. Up to 1.31 ONNX Runtime accepts either a stream or an
allocator, not both. With PyTorch's allocator it computes on the device's default stream, which PyTorch uses as well
unless a script chooses another one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

PROVIDER = "CUDAExecutionProvider"

NVIDIA_VENDOR_ID = 0x10DE
"""NVIDIA's PCI vendor number."""

DEFAULT_STREAM = 1
"""`cudaStreamLegacy`: the default stream, for options in which its handle 0 means that no stream is given."""

DISABLE_SYNCHRONIZATION = "disable_synchronize_execution_providers"
"""The entry of a run's options that lets a run return before the device has finished."""


def stream_for(index: int, torch_memory: bool) -> torch.cuda.Stream:
    """Returns the stream that a session computes on."""
    return torch.cuda.default_stream(index) if torch_memory else torch.cuda.current_stream(index)


def is_on_default_stream(index: int) -> bool:
    """True if PyTorch's current stream is the device's default stream."""
    return bool(torch.cuda.current_stream(index) == torch.cuda.default_stream(index))


def provider_options(index: int, stream: torch.cuda.Stream, *, torch_memory: bool) -> dict[str, str]:
    """Returns the provider's options for a device that it shares with PyTorch."""
    options = {
        "device_id": str(index),
        "do_copy_in_default_stream": "1",  # so copies and kernels keep their order
        "arena_extend_strategy": "kSameAsRequested",  # not by powers of two
    }
    if torch_memory:
        return options | {name: str(address) for name, address in torch_allocator(index).items()}
    return options | {"user_compute_stream": str(stream.cuda_stream or DEFAULT_STREAM)}


@contextmanager
def stream_order(stream: torch.cuda.Stream) -> Iterator[None]:
    """Order the work of a session's stream after PyTorch's work so far, and PyTorch's next work after the session's."""
    current = torch.cuda.current_stream(stream.device)
    if current == stream:
        yield
        return
    stream.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(stream)


_Alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Empty = ctypes.CFUNCTYPE(None)


@cache
def torch_allocator(index: int) -> dict[str, int]:
    """Returns PyTorch's caching allocator for one device: addresses of functions, by the provider's options.

    Each call goes through Python; a compiled extension would need a compiler on the machine that trains.
    """
    device = torch.device("cuda", index)

    def alloc(size: int) -> int | None:
        try:
            address: int = torch.cuda.caching_allocator_alloc(size, device)
            return address
        except torch.cuda.OutOfMemoryError:
            return None  # ONNX Runtime's run then fails, and PyTorch repeats the segment

    def free(address: int | None) -> None:
        if address:
            torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]

    functions = {
        "gpu_external_alloc": _Alloc(alloc),
        "gpu_external_free": _Free(free),
        "gpu_external_empty_cache": _Empty(torch.cuda.empty_cache),
    }
    for function in functions.values():  # ONNX Runtime may call them until the process ends
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
    return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in functions.items()}


def missing() -> str:
    """Returns why this process cannot use CUDA in PyTorch; empty if it can."""
    if torch.version.hip is not None:  # ROCm builds call their devices cuda, too
        return f"torch {torch.__version__} is built for ROCm, for which there is no onnxruntime any more"
    return "" if torch.cuda.is_available() else "PyTorch sees no CUDA device"
