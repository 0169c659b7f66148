"""The installed ONNX Runtime and its abilities, found by running models on it.

Importing this file does not import onnxruntime; calling its functions does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ort_accel.errors import RuntimeMissingError
from ort_accel.runtime.kernel_probes import PROBES
from ort_accel.runtime.ort_distributions import (
    exchange_commands,
    installed_distributions,
    none_installed,
    several_installed,
)

if TYPE_CHECKING:
    import onnx
    import onnxruntime

_OPSETS = range(13, 41)
_IR_VERSIONS = range(7, 31)
_FATAL = 4


@dataclass(frozen=True)
class Flavor:
    """The installed ONNX Runtime."""

    distribution: str
    """The name of the package, such as `onnxruntime-training-cpu`."""
    version: str
    is_training_build: bool
    """True if it was built with gradient kernels and the training session."""
    providers: tuple[str, ...]
    """The execution providers that it was built with; `provider_runs` tells if one works here."""
    newest_opset: int
    """The newest ONNX operator set whose common operators it runs."""
    newest_ir_version: int
    """The newest version of the ONNX file format that it loads."""


def installed_runtime() -> Flavor:
    """Returns the installed ONNX Runtime. Raises `RuntimeMissingError` for none, several, or a broken one."""
    found = installed_distributions()
    if not found:
        raise none_installed()
    if len(found) > 1:
        raise several_installed(found)
    [(distribution, version)] = found.items()
    return _inspect(distribution, version)


def kernels(names: Iterable[str] = tuple(PROBES)) -> dict[str, bool]:
    """Returns for each kernel, named such as `com.microsoft.GatherGrad`, if it runs on the CPU."""
    return {name: kernel_refusal(name) is None for name in names}


def kernel_refusal(name: str) -> str | None:
    """Returns ONNX Runtime's error for this kernel; None if it runs."""
    if name not in PROBES:
        raise ValueError(f"there is no probe for a kernel {name!r}; known are {', '.join(sorted(PROBES))}")
    installed_runtime()
    return _kernel_refusal(name)


def provider_runs(provider: str) -> bool:
    """True if this execution provider works here. The check of a GPU's provider takes some of its memory."""
    return provider_refusal(provider) is None


def provider_refusal(provider: str, options: Mapping[str, str] | None = None) -> str | None:
    """Returns why this execution provider does not work here with these options; None if it works."""
    runtime = installed_runtime()
    if provider not in runtime.providers:
        return f"{runtime.distribution} {runtime.version} was built without it"
    return _provider_refusal(provider, tuple(sorted((options or {}).items())))


@cache
def _inspect(distribution: str, version: str) -> Flavor:
    try:
        imported = importlib.import_module("ort_accel.runtime.import_ort")
        providers = tuple(imported.onnxruntime.get_available_providers())
    except Exception as error:
        raise RuntimeMissingError(
            f"{distribution} {version} is installed but cannot be imported ({_one_line(error)}); install it anew with "
            f"{exchange_commands(distribution, distribution)}"
        ) from error
    return Flavor(
        distribution=distribution,
        version=version,
        is_training_build=hasattr(imported.native, "TrainingAgent"),
        providers=providers,
        newest_opset=_newest(_OPSETS, lambda opset: _common_model(opset, _IR_VERSIONS[0])),
        newest_ir_version=_newest(_IR_VERSIONS, lambda ir_version: _common_model(_OPSETS[0], ir_version)),
    )


@cache
def _kernel_refusal(name: str) -> str | None:
    probe = PROBES[name]
    try:
        _session(probe.model()).run(None, probe.feeds())
    except Exception as error:  # onnxruntime has an exception class for each kind of refusal
        return _one_line(error)
    return None


@cache
def _provider_refusal(provider: str, options: tuple[tuple[str, str], ...]) -> str | None:
    try:
        session = _session(_common_model(_OPSETS[0], _IR_VERSIONS[0]), provider, dict(options))
    except Exception as error:  # a provider whose libraries are missing may raise anything
        return _one_line(error)
    return None if provider in session.get_providers() else "its libraries, such as CUDA and cuDNN, cannot be loaded"


def _newest(versions: range, model: Callable[[int], onnx.ModelProto]) -> int:
    """Returns the highest version whose model loads, where all lower versions load, too."""
    for version in reversed(versions):
        with suppress(Exception):
            _session(model(version))
            return version
    raise RuntimeMissingError(f"the installed ONNX Runtime loads no model of the versions {versions[0]}-{versions[-1]}")


def _session(
    model: onnx.ModelProto, provider: str = "CPUExecutionProvider", options: Mapping[str, str] | None = None
) -> onnxruntime.InferenceSession:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    # In a build for training the first session decides for all whether they have an arena.
    settings.enable_cpu_mem_arena = False
    settings.log_severity_level = _FATAL
    settings.intra_op_num_threads = 1
    providers = [(provider, dict(options or {}))]
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=providers, enable_fallback=False)


def _common_model(opset: int, ir_version: int) -> onnx.ModelProto:
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Transpose", ["x"], ["transposed"]),
        helper.make_node("MatMul", ["x", "transposed"], ["product"]),
        helper.make_node("Softmax", ["product"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 2)) for name in "xy")
    opset_imports = [helper.make_opsetid("", opset)]
    graph = helper.make_graph(nodes, "common", [x], [y])
    return helper.make_model(graph, opset_imports=opset_imports, ir_version=ir_version)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
