"""A CUDA device for tests on machines without one: its sessions run on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch

from ort_accel.runtime import session
from ort_accel.runtime.device import CPU, CPU_PROVIDER, ExecutionDevice


@dataclass(eq=False)
class Stream:
    """A stream of work, with what it waited for."""

    cuda_stream: int
    device: str = "cuda:0"
    waited_for: list[Stream] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        """Wait for the work of another one."""
        self.waited_for.append(other)


@dataclass
class Device:
    """What PyTorch and ONNX Runtime are told of a device."""

    default: Stream = field(default_factory=lambda: Stream(0))
    current: Stream = field(init=False)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    """The settings with which sessions were made."""
    waits: int = 0
    """How often the host waited for the device."""

    def __post_init__(self) -> None:
        self.current = self.default


@pytest.fixture
def cuda_device(monkeypatch) -> Device:
    """PyTorch and ONNX Runtime believe that there is one CUDA device."""
    made = Device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: made.default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.current)
    monkeypatch.setattr(torch._subclasses.fake_tensor, "init_gpu_context", lambda _: None)  # asks the driver
    monkeypatch.setattr(ExecutionDevice, "settle", lambda _: setattr(made, "waits", made.waits + 1))
    create = onnxruntime.InferenceSession

    def on_the_cpu(model: bytes, options: Any, providers: list[Any], **how: Any) -> Any:
        try:
            whole = options.get_session_config_entry(WHOLE) == "1"
        except RuntimeError:  # not set
            whole = False
        made.sessions.append({"providers": providers, "whole": whole} | how)
        options.add_session_config_entry(WHOLE, "0")
        inner = create(model, options, providers=[CPU_PROVIDER], **how)
        names = [item[0] if isinstance(item, tuple) else item for item in providers]
        return SimpleNamespace(_sess=inner._sess, get_providers=lambda: names)

    monkeypatch.setattr(onnxruntime, "InferenceSession", on_the_cpu)
    monkeypatch.setattr(ExecutionDevice, "ort_device", lambda _: REAL_ORT_DEVICE(CPU))
    monkeypatch.setattr(session, "_WITH_ARENA", {0})
    return made


WHOLE = "session.disable_cpu_ep_fallback"

REAL_ORT_DEVICE = ExecutionDevice.ort_device
