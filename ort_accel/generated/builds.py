"""Compiles clusters and graphs in a process of its own, and makes kernels known to sessions."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from packaging.version import Version

from ort_accel.errors import OrtAccelError
from ort_accel.generated.clusters import Cluster
from ort_accel.generated.whole_graph import WholeGraph
from ort_accel.generated.worker import REQUEST, RESULT, SOURCE, Outcome, Request
from ort_accel.native.library import native_library

LIBRARY = Path(SOURCE).with_suffix(".so").name
OLDEST_TORCH = Version("2.13")
MOST_SECONDS = 600
"""The time after which a compilation is given up."""

_RUNNING: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()
_LOADED: list[ctypes.CDLL] = []
"""Libraries of kernels, which stay loaded as long as the process."""

SOURCES = ("clusters.py", "description.py", "inductor.py", "program.py", "whole_graph.py", "worker.py")
"""The files of this package that decide what kept kernels contain."""


class NoKernels(OrtAccelError):
    """Raised if the background process ends without kernels."""


def why_no_code() -> str:
    """Returns the reason why no code can be generated; empty if it can.

    Older releases of Inductor round in 16 bits otherwise than PyTorch's operators, and end the process where an integer
    is divided by zero.
    """
    if Version(torch.__version__) < OLDEST_TORCH:
        return f"torch is {torch.__version__}, and code is generated from {OLDEST_TORCH} on"
    return "" if _compiler() else "there is no C++ compiler; install g++"


def _compiler() -> str:
    """Returns the path of the C++ compiler; empty if there is none."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    return next(filter(None, map(shutil.which, filter(None, names))), "")


def compile_parts(parts: Mapping[str, Cluster | WholeGraph], sources: Path | None) -> tuple[bytes, dict[str, Outcome]]:
    """Returns a library with the kernels of clusters and whole graphs, and the outcome for each part, by its name.

    `sources` is a folder that keeps the kernels' C++.
    """
    with TemporaryDirectory(prefix="ort_accel-") as name:
        folder = Path(name)
        requests = [
            asdict(Request(name, part.source, part.hints, is_graph=isinstance(part, WholeGraph)))
            for name, part in parts.items()
        ]
        content = {"threads": torch.get_num_threads(), "modules": _modules(parts), "parts": requests}
        (folder / REQUEST).write_text(json.dumps(content))
        _run(folder)
        outcomes = {name: Outcome(**item) for name, item in json.loads((folder / RESULT).read_text()).items()}
        if sources is not None:
            _keep_sources(folder, sources, parts)
        library = folder / LIBRARY
        return library.read_bytes() if library.exists() else b"", outcomes


def _modules(parts: Mapping[str, Cluster | WholeGraph]) -> list[str]:
    """Returns the loaded modules that may define operators of whole graphs."""
    texts = [part.source for part in parts.values() if isinstance(part, WholeGraph)]
    used = {name for text in texts for name in re.findall(r"torch\.ops\.(\w+)\.", text)}
    return [name for name in sys.modules if name.partition(".")[0] in used - {"torch"}]


def _run(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "ort_accel.generated.worker", str(folder), str(os.getpid())]
    environment = os.environ | {
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CXX": _compiler(),
        "TORCH_WARM_POOL": "0",  # where there is Triton, Inductor would start processes of its own
    }
    path = os.pathsep.join(filter(None, [_PROJECT, os.environ.get("PYTHONPATH", "")]))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment | {"PYTHONPATH": path}
        )
        _RUNNING.add(process)
        try:
            process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            raise NoKernels(f"compiling took more than {MOST_SECONDS} s") from None
        finally:
            process.kill()
            process.wait()
    if process.returncode or not (folder / RESULT).exists():
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        raise NoKernels(f"the compiling process ended with {process.returncode}: {lines[-1] if lines else 'no words'}")


_PROJECT = str(Path(__file__).parents[2])


def _keep_sources(folder: Path, sources: Path, parts: Mapping[str, Cluster | WholeGraph]) -> None:
    sources.mkdir(parents=True, exist_ok=True)
    first = next(iter(parts))
    if (folder / SOURCE).exists():
        shutil.copyfile(folder / SOURCE, sources / f"{first}.cpp")
    for name, part in parts.items():
        (sources / f"{name}.py").write_text(part.source)


def load_library(library: bytes) -> ctypes.CDLL:
    """Returns a loaded library, which needs no file any more."""
    with TemporaryDirectory(prefix="ort_accel-") as folder:
        path = Path(folder) / LIBRARY
        path.write_bytes(library)
        return ctypes.CDLL(str(path))


def load_kernels(library: bytes, names: Sequence[str]) -> None:
    """Load a library, and make some of its kernels known to the sessions that are created from now on."""
    if not names:
        return
    native = native_library()
    assert native is not None
    loaded = load_library(library)
    _LOADED.append(loaded)
    for name in names:
        address = ctypes.cast(loaded[name], ctypes.c_void_p)
        native.ort_accel_add_kernel(name.encode(), address)


@cache
def build_version() -> str:
    """Returns what a kernel depends on beside its description: torch, the processor, and what writes kernels."""
    own = b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)
    flags = (
        Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].splitlines()[0]
        if Path("/proc/cpuinfo").exists()
        else ""
    )
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {flags} {own.hex()}"


def _end_processes() -> None:
    for process in list(_RUNNING):
        if process.poll() is None:
            process.kill()


atexit.register(_end_processes)
