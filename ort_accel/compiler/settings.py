"""`Settings`: the configuration of a model, resolved by the installed runtime, the device and PyTorch's settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ort_accel.compiler.device_placement import place_for, products_are_tf32
from ort_accel.compiler.refusals import refuse_unsupported
from ort_accel.config import Config
from ort_accel.errors import OrtAccelError
from ort_accel.native.library import native_library
from ort_accel.observe.logs import severity
from ort_accel.passes.options import PassOptions
from ort_accel.runtime.device import CPU, ExecutionDevice
from ort_accel.runtime.installed_ort import Flavor, installed_runtime
from ort_accel.runtime.ort_distributions import exchange_commands
from ort_accel.runtime.session import SessionSettings

NEWEST_OPSET = 20
"""The newest operator set that the lowerings are written for."""


@dataclass(frozen=True)
class PyTorchSettings:
    """Settings of PyTorch that sessions follow."""

    deterministic: bool
    threads: int
    tf32: bool

    @staticmethod
    def now() -> PyTorchSettings:
        """Returns the present settings."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return PyTorchSettings(deterministic, torch.get_num_threads(), products_are_tf32())


@dataclass(frozen=True)
class Settings:
    """Settings that hold for all graphs of a model."""

    config: Config
    runtime: Flavor
    place: ExecutionDevice
    session: SessionSettings
    opset: int
    pytorch: PyTorchSettings
    """PyTorch's settings that the sessions were resolved with."""
    parameters_stay: bool = True
    """Parameters stay at their addresses from step to step, so that their memory may be held."""
    zero3: bool = False
    """ZeRO stage 3 moves parameters."""
    sees_steps: bool = True
    """A call is a step of a whole model, so that the next call can run what this one has taught."""

    @property
    def times_operators(self) -> bool:
        """True if measured times may decide who runs an operator.

        They may not where every process must place alike: for equal bits in each run, and for recomputed operators.
        """
        config = self.config
        is_fixed = config.compute.placement != "auto" or self.session.deterministic or config.memory.saves
        return not is_fixed and not self.place.is_cuda

    @property
    def calls_pytorch(self) -> bool:
        """True if sessions call kernels of PyTorch and of ort_accel."""
        return self.config.compute.native and not self.place.is_cuda and native_library() is not None

    @property
    def passes(self) -> PassOptions:
        """Returns the switches of the graph passes."""
        return PassOptions(self.config.compute.fusions is not False, self.config.precision.cast_propagation)

    def follow_pytorch(self) -> Settings:
        """Returns these settings, or new ones if PyTorch's settings have changed since."""
        pytorch = PyTorchSettings.now()
        if pytorch == self.pytorch:
            return self
        place = place_for(self.config, self.runtime, self.place.device)
        return replace(self, place=place, session=session_settings(self.config, place), pytorch=pytorch)


def resolve(
    config: Config,
    device: torch.device = CPU.device,
    *,
    parameters_stay: bool = True,
    zero3: bool = False,
    sees_steps: bool = True,
) -> Settings:
    """Returns the settings for a model on a device; raises for what this version, or what is installed, cannot do."""
    refuse_unsupported(config)
    runtime = chosen_runtime(config)
    place = place_for(config, runtime, device)
    return Settings(
        config,
        runtime,
        place,
        session_settings(config, place),
        opset(config, runtime),
        PyTorchSettings.now(),
        parameters_stay=parameters_stay,
        zero3=zero3,
        sees_steps=sees_steps,
    )


def chosen_runtime(config: Config) -> Flavor:
    """Returns the installed runtime; raises if the configuration asks for the other one."""
    runtime, wish = installed_runtime(), config.engine.runtime
    is_training = wish == "onnxruntime-training"
    if wish != "auto" and is_training != runtime.is_training_build:
        wanted = "onnxruntime-training-cpu" if is_training else "onnxruntime"
        raise OrtAccelError(
            f"engine.runtime is {wish}, but {runtime.distribution} {runtime.version} is installed; "
            f"{exchange_commands(runtime.distribution, wanted)}, or set it to auto"
        )
    return runtime


def session_settings(config: Config, place: ExecutionDevice = CPU) -> SessionSettings:
    """Returns the settings of ONNX Runtime's sessions."""
    engine = config.engine
    threads = torch.get_num_threads() if engine.threads == "auto" else engine.threads
    wish = engine.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled() if wish == "auto" else wish
    return SessionSettings(
        threads=threads,
        optimize=config.compute.fusions is not False,
        deterministic=deterministic,
        log_severity=severity(config.observe.log_level),
        place=place,
    )


def opset(config: Config, runtime: Flavor) -> int:
    """Returns the operator set of the models."""
    wish = config.engine.opset
    if wish == "auto":
        return min(runtime.newest_opset, NEWEST_OPSET)
    if wish > runtime.newest_opset:
        raise OrtAccelError(
            f"engine.opset is {wish}, but {runtime.distribution} {runtime.version} runs {runtime.newest_opset} at most"
        )
    return wish
