"""A model runs on the device that its parameters are on, or it is an error that says what to do."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ort_accel
from ort_accel.compiler import device_placement
from ort_accel.compiler.backend import Backend
from ort_accel.compiler.device_placement import device_of, place_for
from ort_accel.compiler.settings import resolve, session_settings
from ort_accel.config import load_config
from ort_accel.errors import ConfigError, OrtAccelError
from ort_accel.reporting.report import Report, State
from ort_accel.runtime import cuda
from ort_accel.runtime.installed_ort import installed_runtime
from tests.pretend_cuda import Stream

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def config(**sections):
    return load_config({"version": 1, **sections})


@pytest.fixture
def runtime(cuda_device, monkeypatch):
    """An onnxruntime whose CUDA provider works."""
    monkeypatch.setattr(device_placement, "provider_refusal", lambda *_: None)
    return replace(installed_runtime(), providers=(cuda.PROVIDER, "CPUExecutionProvider"))


def on(device):
    model = nn.Module()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(2, 2, device=device))
    return model


def test_the_device_is_that_of_the_parameters():
    assert device_of(on("cuda:1")) == torch.device("cuda", 1)
    assert device_of(nn.Linear(2, 2)) == CPU
    assert device_of(nn.ReLU()) == CPU
    assert device_of(nn.Linear(2, 2, device="meta")) == CPU


def test_a_model_on_two_devices_is_refused():
    with pytest.raises(OrtAccelError, match=r"on cpu, cuda:0; .*model\.to\('cpu'\)"):
        device_of(nn.ModuleList([nn.Linear(2, 2), on("cuda:0")]))


def test_a_cuda_model_without_a_cuda_onnxruntime_says_what_to_install():
    name = installed_runtime().distribution
    with pytest.raises(OrtAccelError, match=rf"on cuda:0, but {name} .* was built without CUDA; .*onnxruntime-gpu"):
        ort_accel.accelerate(on("cuda:0"))


def test_a_provider_that_does_not_load_is_refused_with_its_error(runtime, monkeypatch):
    monkeypatch.setattr(device_placement, "provider_refusal", lambda *_: "no libcudnn")
    with pytest.raises(OrtAccelError, match=r"on cuda:0, but the CUDA provider of .* does not run there: no libcudnn"):
        place_for(config(), runtime, GPU)


def test_a_build_of_torch_for_rocm_is_refused(runtime, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(OrtAccelError, match="built for ROCm"):
        place_for(config(), runtime, GPU)


@pytest.mark.parametrize(("wish", "where"), [("cuda", CPU), ("cpu", GPU)])
def test_a_provider_for_another_device_than_the_models_is_refused(wish, where):
    with pytest.raises(OrtAccelError, match=rf"engine\.provider is {wish}, but the model is on {where}"):
        place_for(config(engine={"provider": wish}), installed_runtime(), where)


@pytest.mark.parametrize(
    ("section", "key", "wish"),
    [
        ("compute", "conv_algorithm", {"conv_algorithm": "exhaustive"}),
        ("memory", "external_allocator", {"external_allocator": True}),
        ("memory", "offload", {"offload": True, "budget": 0.5}),
    ],
)
def test_keys_for_cuda_are_refused_for_a_model_on_the_cpu(section, key, wish):
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: works on cuda only, and the model is on the CPU"):
        ort_accel.accelerate(nn.Linear(2, 2), {section: wish})


def test_a_cuda_model_shares_pytorchs_memory_by_default(runtime):
    place = place_for(config(), runtime, torch.device("cuda", 1))
    assert (place.kind, place.index, place.torch_memory) == ("cuda", 1, True)
    assert dict(place.options) == {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"}


def test_tf32_follows_pytorch(runtime, monkeypatch):
    monkeypatch.setattr(device_placement, "products_are_tf32", lambda: True)
    assert dict(place_for(config(), runtime, GPU).options)["use_tf32"] == "1"


def test_the_provider_is_told_the_options_of_the_configuration(runtime):
    given = {"provider": "cuda", "provider_options": {"use_tf32": True, "fuse_conv_bias": 1}}
    place = place_for(config(engine=given, compute={"conv_algorithm": "exhaustive"}), runtime, GPU)
    assert dict(place.options) == {"cudnn_conv_algo_search": "EXHAUSTIVE", "use_tf32": "1", "fuse_conv_bias": "1"}


def test_a_limit_for_onnxruntimes_pool_keeps_that_pool(runtime):
    limited = {"provider": "cuda", "provider_options": {"gpu_mem_limit": 1 << 30}}
    assert not place_for(config(engine=limited), runtime, GPU).torch_memory
    with pytest.raises(ConfigError, match=r"memory\.external_allocator: true, but .* has gpu_mem_limit"):
        place_for(config(engine=limited, memory={"external_allocator": True}), runtime, GPU)


def test_memory_is_not_shared_on_a_stream_other_than_the_default(runtime, cuda_device):
    cuda_device.current = Stream(4096)
    assert not place_for(config(), runtime, GPU).torch_memory
    with pytest.raises(ConfigError, match=r"takes a stream or an allocator, not both; write auto or false"):
        place_for(config(memory={"external_allocator": True}), runtime, GPU)


def test_memory_is_not_shared_when_switched_off(runtime):
    assert not place_for(config(memory={"external_allocator": False}), runtime, GPU).torch_memory


def test_the_report_describes_the_cuda_device(runtime, monkeypatch):
    monkeypatch.setattr("ort_accel.compiler.settings.chosen_runtime", lambda _: runtime)
    report = Report()
    wish = config(engine={"provider": "cuda", "provider_options": {"use_tf32": 0}})
    Backend(resolve(wish, GPU), report)
    found = report.features
    assert "CUDA device 0" in found["engine"].effect
    assert found["engine.provider_options"].effect == "use_tf32 0"
    assert found["memory.external_allocator"].state is State.APPLIED
    assert found["compute.conv_algorithm"].effect == "cuDNN searches for kernels: heuristic"
    assert found["compute.generated.enabled"].reason == "for the CPU; the model is on a CUDA device"


def test_the_report_says_which_keys_are_for_cuda():
    found = ort_accel.report(ort_accel.accelerate(nn.Linear(2, 2))).features
    for path in ("memory.external_allocator", "compute.conv_algorithm"):
        assert found[path].state is State.OFF
        assert found[path].reason == "for CUDA devices; the model is on the CPU"


def test_a_model_that_was_moved_after_set_up_raises():
    with FakeTensorMode():
        graph = torch.fx.symbolic_trace(nn.ReLU())
        with pytest.raises(OrtAccelError, match=r"set up for the CPU and is called with tensors on cuda:0; move it"):
            Backend(resolve(config()), Report())(graph, [torch.empty(2, device="cuda:0")])


def test_the_pool_of_a_cuda_device_has_the_limit_of_the_options(runtime):
    limited = {"provider": "cuda", "provider_options": {"gpu_mem_limit": 4096}}
    place = place_for(config(engine=limited), runtime, GPU)
    assert session_settings(config(), place).place is place
    assert dict(place.options)["gpu_mem_limit"] == "4096"
