"""Lists the distributions of ONNX Runtime, known and installed, and the errors where none or several are installed."""

from __future__ import annotations

import importlib.metadata
import sys

from ort_accel.errors import RuntimeMissingError

EXTRAS = {
    "onnxruntime-training": "training-gpu",
    "onnxruntime-training-cpu": "training",
    "onnxruntime-gpu": "gpu",
    "onnxruntime": "cpu",
}
"""Each distribution of ONNX Runtime that ort_accel offers, the most capable first, and the extra that installs it."""

REQUIREMENTS = {
    "training": "onnxruntime-training-cpu==1.19.2",
    "cpu": "onnxruntime>=1.24,<2",
    "gpu": "onnxruntime-gpu>=1.24,<2",
    "training-gpu": "onnxruntime-training==1.19.2",
}
"""The package of each extra, as in `pyproject.toml`. A command that names it works wherever ort_accel came from."""

_NEWEST_PYTHON = {"training": (3, 12), "cpu": (4, 0), "gpu": (4, 0), "training-gpu": (3, 11)}
"""Each extra with the newest Python for which its package was released, the one to be recommended first."""

_OTHER_DISTRIBUTIONS = (
    "onnxruntime-azure",
    "onnxruntime-cann",
    "onnxruntime-coreml",
    "onnxruntime-directml",
    "onnxruntime-migraphx",
    "onnxruntime-noopenmp",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-silicon",
    "onnxruntime-training-rocm",
    "onnxruntime-vitisai",
    "onnxruntime-webgpu",
    "onnxruntime-windowsml",
    "ort-nightly",
    "ort-nightly-directml",
    "ort-nightly-gpu",
    "ort-training-nightly",
)
DISTRIBUTIONS = (*EXTRAS, *_OTHER_DISTRIBUTIONS)
"""Every known distribution that brings the module `onnxruntime`."""


def installed_distributions() -> dict[str, str]:
    """Return every installed distribution of ONNX Runtime, with its version."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def newest_python(distribution: str) -> tuple[int, int] | None:
    """Return the newest Python that a distribution was released for; None if it is not known."""
    return _NEWEST_PYTHON.get(EXTRAS.get(distribution, ""))


def install_command(extra: str) -> str:
    """Return the command that installs the ONNX Runtime of an extra."""
    return f'pip install "{REQUIREMENTS[extra]}"'


def exchange_commands(removed: str, installed: str) -> str:
    """Return the commands that replace one or several distributions by one of them, or by another one."""
    command = install_command(EXTRAS[installed]) if installed in EXTRAS else f"pip install {installed}"
    return f"`pip uninstall -y {removed}` and then `{command}`"


def none_installed(python: tuple[int, int] = sys.version_info[:2]) -> RuntimeMissingError:
    """Return the error where there is no ONNX Runtime; it names the extras for this version of Python."""
    best, *others = [extra for extra, newest in _NEWEST_PYTHON.items() if python <= newest]
    instead = " or ".join(f'"{REQUIREMENTS[extra]}"' for extra in others)
    return RuntimeMissingError(
        f"no ONNX Runtime is installed; for Python {python[0]}.{python[1]} install one with "
        f"`{install_command(best)}`, or {instead} in its place"
    )


def several_installed(found: dict[str, str]) -> RuntimeMissingError:
    """Return the error where several distributions are installed; it says how to keep one."""
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    keep = next(iter(found))
    return RuntimeMissingError(
        f"{len(found)} ONNX Runtimes are installed ({listed}) and overwrite each other's files; keep one: "
        f"{exchange_commands(' '.join(found), keep)}"
    )
