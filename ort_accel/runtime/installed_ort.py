"""Which ONNX Runtime is installed, and what it can really do: the runtime is asked, nothing is assumed.

Importing this file imports no onnxruntime; calling its functions does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ort_accel.errors import RuntimeMissingError
from ort_accel.runtime.kernel_probes import PROBES
from ort_accel.runtime.ort_distributions import EXTRAS, installed_distributions, none_installed, several_installed

if TYPE_CHECKING:
    import onnx

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
    """Whether it was built with training: gradient kernels and the training session."""
    providers: tuple[str, ...]
    """The execution providers that it was built with. Whether one works here, `provider_runs` tells."""
    newest_opset: int
    """The newest ONNX operator set whose everyday operators it runs."""
    newest_ir_version: int
    """The newest version of the ONNX file format that it loads."""


def installed_runtime() -> Flavor:
    """The one ONNX Runtime that is installed. None, several, or a broken one is a `RuntimeMissingError`."""
    found = installed_distributions()
    if not found:
        raise none_installed()
    if len(found) > 1:
        raise several_installed(found)
    [(distribution, version)] = found.items()
    return _ask(distribution, version)


def kernels(names: Iterable[str] = tuple(PROBES)) -> dict[str, bool]:
    """Whether each kernel, named as in `com.microsoft.GatherGrad`, exists here and runs on the CPU."""
    return {name: kernel_refusal(name) is None for name in names}


def kernel_refusal(name: str) -> str | None:
    """What ONNX Runtime says against running this kernel; None if it runs."""
    if name not in PROBES:
        raise ValueError(f"there is no probe for a kernel {name!r}; known are {', '.join(sorted(PROBES))}")
    installed_runtime()
    return _kernel_refusal(name)


def provider_runs(provider: str) -> bool:
    """Whether this execution provider works here. For a GPU's this takes some of its memory."""
    return provider_refusal(provider) is None


def provider_refusal(provider: str, options: Mapping[str, str] | None = None) -> str | None:
    """Why this execution provider does not work here with these options; None if it does."""
    runtime = installed_runtime()
    if provider not in runtime.providers:
        return f"{runtime.distribution} {runtime.version} was built without it"
    return _provider_refusal(provider, tuple(sorted((options or {}).items())))


@cache
def _ask(distribution: str, version: str) -> Flavor:
    try:
        imported = importlib.import_module("ort_accel.runtime.import_ort")
        providers = tuple(imported.onnxruntime.get_available_providers())
    except Exception as error:
        install = f'"ort-accel[{EXTRAS[distribution]}]"' if distribution in EXTRAS else distribution
        raise RuntimeMissingError(
            f"{distribution} {version} is installed but cannot be imported ({_one_line(error)}); install it anew with "
            f"`pip uninstall -y {distribution}` and then `pip install {install}`"
        ) from error
    return Flavor(
        distribution=distribution,
        version=version,
        is_training_build=hasattr(imported.native, "TrainingAgent"),
        providers=providers,
        newest_opset=_newest(_OPSETS, lambda opset: _everyday_model(opset, _IR_VERSIONS[0])),
        newest_ir_version=_newest(_IR_VERSIONS, lambda ir_version: _everyday_model(_OPSETS[0], ir_version)),
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
        session = _session(_everyday_model(_OPSETS[0], _IR_VERSIONS[0]), provider, dict(options))
    except Exception as error:  # a provider whose libraries are missing may raise anything
        return _one_line(error)
    return None if provider in session.get_providers() else "its libraries, such as CUDA and cuDNN, cannot be loaded"


def _newest(versions: range, model: Callable[[int], onnx.ModelProto]) -> int:
    """The highest version whose model loads. Versions that are refused lie above those that load."""
    for version in reversed(versions):
        with suppress(Exception):
            _session(model(version))
            return version
    raise RuntimeMissingError(f"the installed ONNX Runtime loads no model of the versions {versions[0]}-{versions[-1]}")


def _session(
    model: onnx.ModelProto, provider: str = "CPUExecutionProvider", options: Mapping[str, str] | None = None
) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = _FATAL
    settings.intra_op_num_threads = 1
    providers = [(provider, dict(options or {}))]
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=providers, enable_fallback=False)


def _everyday_model(opset: int, ir_version: int) -> onnx.ModelProto:
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Transpose", ["x"], ["transposed"]),
        helper.make_node("MatMul", ["x", "transposed"], ["product"]),
        helper.make_node("Softmax", ["product"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 2)) for name in "xy")
    opset_imports = [helper.make_opsetid("", opset)]
    graph = helper.make_graph(nodes, "everyday", [x], [y])
    return helper.make_model(graph, opset_imports=opset_imports, ir_version=ir_version)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
