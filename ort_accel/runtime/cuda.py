"""ONNX Runtime on a CUDA device beside PyTorch: the same stream, and, where that is wanted, the same memory.

On one stream the work of both is done in the order in which it was asked for, so neither waits on the host. Up to 1.31
ONNX Runtime takes either a stream or an allocator from outside, not both: with an allocator it computes on the device's
default stream, which is the one that PyTorch computes on unless a script says otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

PROVIDER = "CUDAExecutionProvider"

NVIDIA = 0x10DE
"""Who made a device, by its number on the bus."""

DEFAULT_STREAM = 1
"""CUDA's name for the default stream where 0, its handle, would mean that no stream is given (`cudaStreamLegacy`)."""

NOT_SYNCHRONIZED = "disable_synchronize_execution_providers"
"""The entry of a run's options by which a run does not wait for the device."""


def stream_for(index: int, torch_memory: bool) -> torch.cuda.Stream:
    """The stream that a session computes on."""
    return torch.cuda.default_stream(index) if torch_memory else torch.cuda.current_stream(index)


def is_on_default_stream(index: int) -> bool:
    """Whether PyTorch computes on a device's default stream at this moment."""
    return bool(torch.cuda.current_stream(index) == torch.cuda.default_stream(index))


def provider_options(index: int, stream: torch.cuda.Stream, *, torch_memory: bool) -> dict[str, str]:
    """What the provider must be told to share a device with PyTorch."""
    options = {
        "device_id": str(index),
        "do_copy_in_default_stream": "1",  # copies are made in the order of the kernels
        "arena_extend_strategy": "kSameAsRequested",  # by what is asked for, not by powers of two
    }
    if torch_memory:
        return options | {name: str(address) for name, address in torch_allocator(index).items()}
    return options | {"user_compute_stream": str(stream.cuda_stream or DEFAULT_STREAM)}


@contextmanager
def in_order(stream: torch.cuda.Stream) -> Iterator[None]:
    """While this is entered, what a session computes on its stream keeps its place among PyTorch's own work."""
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
    """PyTorch's caching allocator for one device as addresses of functions, by the options that take them.

    Each call goes through Python, which takes about 0.2 microseconds; a compiled extension would not, but needs a
    compiler on the machine that trains.
    """
    device = torch.device("cuda", index)

    def alloc(size: int) -> int | None:
        try:
            address: int = torch.cuda.caching_allocator_alloc(size, device)
            return address
        except torch.cuda.OutOfMemoryError:
            return None  # ONNX Runtime then fails in its own way, and PyTorch runs that part

    def free(address: int | None) -> None:
        if address:
            torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]

    functions = {
        "gpu_external_alloc": _Alloc(alloc),
        "gpu_external_free": _Free(free),
        "gpu_external_empty_cache": _Empty(torch.cuda.empty_cache),
    }
    for function in functions.values():  # called as long as a tensor of ONNX Runtime lives: to the end of the process
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
    return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in functions.items()}


def missing() -> str:
    """What a process lacks for CUDA in PyTorch; empty where it has all."""
    if torch.version.hip is not None:  # such builds call their devices cuda, too
        return f"torch {torch.__version__} is built for ROCm, for which there is no onnxruntime any more"
    return "" if torch.cuda.is_available() else "PyTorch sees no CUDA device"
