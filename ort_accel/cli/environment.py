"""Facts about the installation: versions, ONNX Runtime, devices, and the commands that install missing packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import ort_accel
from ort_accel.errors import RuntimeMissingError
from ort_accel.memory.malloc_settings import COALESCING_TUNABLE, fragments_heap
from ort_accel.native.library import NativeStatus, native_status
from ort_accel.runtime import installed_ort, ort_distributions
from ort_accel.runtime.kernel_probes import FUSED, RECENT, TRAINING

_OPTIONAL = ("deepspeed",)
_EXTRAS = ("deepspeed", *ort_distributions.EXTRAS.values())
_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Devices:
    """The devices that PyTorch computes on."""

    cpu_threads: int
    cuda: tuple[str, ...]
    """The name of each CUDA device."""


@dataclass(frozen=True)
class Runtime:
    """The installed ONNX Runtime with the providers and kernels that it can run."""

    flavor: installed_ort.Flavor
    usable_providers: tuple[str, ...]
    kernels: dict[str, dict[str, bool]]
    """Under `training`, `fused` and `recent`: True for each kernel that runs on the CPU."""


@dataclass(frozen=True)
class Environment:
    """The facts that `ort-accel env` prints."""

    python: str
    platform: str
    versions: dict[str, str | None]
    """The version of each package that ort_accel needs or can use; None where it is missing."""
    runtime: Runtime | None
    native: NativeStatus
    devices: Devices | None
    blockers: tuple[str, ...]
    """Reasons why training cannot run, each with the command that mends it."""
    warnings: tuple[str, ...]
    """Packages outside of the supported range, unused devices, and settings that waste memory."""

    def to_dict(self) -> dict[str, object]:
        """Returns the facts as plain data."""
        return {"can_train": not self.blockers, **asdict(self)}


def inspect_environment() -> Environment:
    """Ask Python, the packages, ONNX Runtime and PyTorch. A missing one is an entry, never an exception."""
    blockers: list[str] = []
    warnings: list[str] = []
    versions = _versions(blockers, warnings)
    runtime = _runtime(blockers)
    devices = _devices(blockers) if versions.get("torch") else None
    if runtime:
        warnings += _python_warnings(runtime.flavor)
        warnings += _device_warnings(runtime, devices)
        warnings += _memory_warnings(devices)
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        versions=versions,
        runtime=runtime,
        native=native_status(),
        devices=devices,
        blockers=tuple(blockers),
        warnings=tuple(warnings),
    )


def _versions(blockers: list[str], warnings: list[str]) -> dict[str, str | None]:
    from packaging.requirements import Requirement

    versions: dict[str, str | None] = {"ort-accel": ort_accel.__version__}
    for requirement in map(Requirement, _requirements()):
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in _EXTRAS):
            continue
        name, allowed = requirement.name, requirement.specifier
        version = _installed_version(name)
        if name in _OPTIONAL or marker is None:
            versions[name] = version
        if version is None and marker is None:
            blockers.append(f'{name} is not installed; `pip install "{name}{allowed}"`')
        elif version is not None and not allowed.contains(version, prereleases=True):
            warnings.append(
                f'{name} {version} is not in the supported range {allowed}; `pip install "{name}{allowed}"`'
            )
    return versions


def _requirements() -> list[str]:
    """Returns the requirements of ort_accel: of the installed package, or of the checkout that it runs from."""
    project = Path(ort_accel.__file__).parent.parent / "pyproject.toml"
    if not project.is_file():
        return importlib.metadata.requires("ort-accel") or []
    table = tomllib.loads(project.read_text("utf-8"))["project"]
    optional = [f'{line}; extra == "{extra}"' for extra in _EXTRAS for line in table["optional-dependencies"][extra]]
    return [*table["dependencies"], *optional]


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime(blockers: list[str]) -> Runtime | None:
    if _installed_version("onnx") is None and len(ort_distributions.installed_distributions()) == 1:
        return None  # probes need onnx, whose absence is a blocker already
    try:
        found = installed_ort.installed_runtime()
    except RuntimeMissingError as error:
        blockers.append(str(error))
        return None
    groups = {"training": TRAINING, "fused": FUSED, "recent": RECENT}
    usable = tuple(provider for provider in found.providers if installed_ort.provider_runs(provider))
    return Runtime(found, usable, {group: installed_ort.kernels(names) for group, names in groups.items()})


def _devices(blockers: list[str]) -> Devices | None:
    try:
        torch = importlib.import_module("torch")
        names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Devices(torch.get_num_threads(), names)
    except Exception as error:  # a broken installation may raise anything
        blockers.append(
            f"torch cannot be imported ({' '.join(str(error).split())}); `pip install --force-reinstall torch`"
        )
        return None


def _python_warnings(found: installed_ort.Flavor) -> list[str]:
    version = tuple(map(int, platform.python_version_tuple()[:2]))
    newest = ort_distributions.newest_python(found.distribution)
    if version < _OLDEST_PYTHON:
        return [f"Python {platform.python_version()} is older than 3.11, which ort_accel is written for"]
    if newest is not None and version > newest:
        return [f"{found.distribution} {found.version} was not released for Python {platform.python_version()}"]
    return []


def _device_warnings(runtime: Runtime, devices: Devices | None) -> list[str]:
    has_cuda = "CUDAExecutionProvider" in runtime.usable_providers
    if devices and devices.cuda and not has_cuda:
        found = runtime.flavor
        if "CUDAExecutionProvider" in found.providers:
            return [
                f"{found.distribution} was built for CUDA, but its CUDA provider does not load; install CUDA and cuDNN"
            ]
        swap = ort_distributions.exchange_commands(found.distribution, "onnxruntime-gpu")
        return [f"there is a CUDA device, but {found.distribution} cannot use it; {swap}"]
    if devices and not devices.cuda and has_cuda:
        return ["ONNX Runtime can use CUDA, but PyTorch sees no device; install a CUDA build of torch"]
    return []


def _memory_warnings(devices: Devices | None) -> list[str]:
    if devices and not devices.cuda and fragments_heap():
        return [
            "glibc leaves gaps between what a step frees, which can take as much as what is in use; "
            f"`ort-accel launch` starts processes without them, or set GLIBC_TUNABLES={COALESCING_TUNABLE} before "
            "training starts"
        ]
    return []
