"""Finds the native library and loads it; says why it is missing, and which command builds it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import platform
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY_FILE = Path(__file__).with_name("libort_accel.so")
INSTRUCTION_SETS = ("baseline", "AVX2 with FMA", "AVX-512")
"""The name of each level, for which a kernel can be compiled."""

_COMPILERS = ("c++", "g++", "clang++")
_INSTALLS_COMPILER = {"apt-get": "sudo apt-get install -y g++", "dnf": "sudo dnf install -y gcc-c++"}


@dataclass(frozen=True)
class NativeStatus:
    """The state of the native library, as `ort-accel env` and the report show it."""

    built_for: tuple[str, ...] = ()
    """The instruction sets that it has kernels for; empty where it is missing."""
    runs: str | None = None
    """The instruction set that is used on this processor; None where the library is missing."""
    missing: str = ""
    """The reason why it cannot be used, and the command that builds it; empty where it can."""

    def __str__(self) -> str:
        if self.missing:
            return f"missing: {self.missing}"
        return f"built for {', '.join(self.built_for)}; {self.runs} runs here"


def native_library() -> ctypes.CDLL | None:
    """Returns the native library; None where it cannot be used. A forked process has what its parent loaded."""
    loaded = _load()
    return None if isinstance(loaded, str) else loaded


def kernel(name: str, *argument_types: type[Any], level: int | None = None) -> ctypes._FuncPointer:
    """Returns a kernel as a function, in its variant for an instruction set; by default for this processor's best.

    It runs on PyTorch's threads where torch is imported.
    """
    library = native_library()
    assert library is not None, native_status().missing
    library.ort_accel_attach()
    address = library.ort_accel_kernel(name.encode(), library.ort_accel_level() if level is None else level)
    assert address, f"the native library has no kernel {name}"
    return ctypes.CFUNCTYPE(None, *argument_types)(address)


@cache
def native_status() -> NativeStatus:
    """Returns what the native library was built for, or why it is missing."""
    library = _load()
    if isinstance(library, str):
        return NativeStatus(missing=library)
    built = tuple(name for level, name in enumerate(INSTRUCTION_SETS) if library.ort_accel_has_level(level))
    return NativeStatus(built, INSTRUCTION_SETS[library.ort_accel_level()])


@cache
def _load() -> ctypes.CDLL | str:
    """Returns the library, or the reason why it cannot be used with the command that builds it."""
    if platform.system() != "Linux":
        return f"it is built for Linux only, and this is {platform.system()}"
    if not LIBRARY_FILE.is_file():
        return _not_built()
    try:
        return _declared(ctypes.CDLL(str(LIBRARY_FILE)))
    except OSError as error:
        return f"it does not load ({' '.join(str(error).split())}); build it anew with `{_build_command()}`"
    except AttributeError as error:
        return f"it is of another version ({error}); build it anew with `{_build_command()}`"


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions that Python calls. Raises an `AttributeError` for one that the library lacks."""
    library.ort_accel_level.restype = ctypes.c_int
    library.ort_accel_level.argtypes = ()
    library.ort_accel_has_level.restype = ctypes.c_bool
    library.ort_accel_has_level.argtypes = (ctypes.c_int,)
    library.ort_accel_attach.restype = ctypes.c_char_p
    library.ort_accel_attach.argtypes = ()
    library.ort_accel_release.restype = None
    library.ort_accel_release.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.ort_accel_kernel.restype = ctypes.c_void_p
    library.ort_accel_kernel.argtypes = (ctypes.c_char_p, ctypes.c_int)
    library.ort_accel_add_kernel.restype = None
    library.ort_accel_add_kernel.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    return library


def _not_built() -> str:
    if any(map(shutil.which, _COMPILERS)):
        return f"it was not built when ort_accel was installed; build it with `{_build_command()}`"
    install = next((command for tool, command in _INSTALLS_COMPILER.items() if shutil.which(tool)), None)
    if install is None:
        return f"it was not built, since there is no C++17 compiler; install one, and then `{_build_command()}`"
    return f"it was not built, since there is no C++17 compiler; `{install} && {_build_command()}`"


def _build_command() -> str:
    """Returns the command that builds the library: for a checkout, or for the installed package."""
    project = LIBRARY_FILE.parents[2]
    if (project / "Makefile").is_file() and (project / "pyproject.toml").is_file():
        return f"make -C {project} native"
    return f"pip install --force-reinstall --no-deps --no-cache-dir {_source()}"


def _source() -> str:
    """Returns where pip got the package from, as an argument for pip."""
    try:
        origin = importlib.metadata.distribution("ort-accel").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    known = json.loads(origin) if origin else {}
    url = str(known.get("url", ""))
    if not url or url.endswith(".whl"):
        return "--no-binary ort-accel ort-accel"
    scheme = known.get("vcs_info", {}).get("vcs", "")
    return f'"ort-accel @ {scheme}+{url}"' if scheme else f'"ort-accel @ {url}"'
