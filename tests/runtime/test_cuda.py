"""A session on a CUDA device shares PyTorch's stream and, where it may, PyTorch's memory."""

import ctypes

import onnx_ir as ir
import pytest
import torch

from ort_accel.lowering.onnx_graph import OnnxGraph
from ort_accel.runtime import cuda
from ort_accel.runtime.device import ExecutionDevice
from ort_accel.runtime.dlpack import to_ort
from ort_accel.runtime.session import Session, SessionSettings
from tests.pretend_cuda import REAL_ORT_DEVICE, Stream

ONE, SHARED = ExecutionDevice("cuda", 0), ExecutionDevice("cuda", 0, torch_memory=True)


def model():
    graph = OnnxGraph(opset=17)
    result = graph.op("Neg", graph.input("x", torch.ones(3)))
    result.name = "y"
    return ir.to_proto(graph.model([result], "negative")).SerializeToString()


def session(place, **how):
    return Session(model(), ["x"], ["y"], SessionSettings(threads=1, place=place, **how))


def options_of(cuda_device):
    return cuda_device.sessions[-1]["providers"][0][1]


@pytest.mark.parametrize(("handle", "said"), [(0, "1"), (4096, "4096")])
def test_a_session_computes_on_pytorchs_stream(cuda_device, handle, said):
    cuda_device.current = Stream(handle)
    session(ONE)
    assert options_of(cuda_device)["user_compute_stream"] == said
    assert options_of(cuda_device)["device_id"] == "0"
    assert cuda_device.sessions[-1]["providers"][0][0] == cuda.PROVIDER


def test_with_pytorchs_allocator_the_provider_gets_no_stream(cuda_device):
    session(SHARED)
    given = options_of(cuda_device)
    assert not {name for name in given if "stream" in name and name != "do_copy_in_default_stream"}
    assert all(int(given[f"gpu_external_{what}"]) for what in ("alloc", "free", "empty_cache"))


def test_options_of_the_configuration_come_last(cuda_device):
    session(ExecutionDevice("cuda", 0, (("arena_extend_strategy", "kNextPowerOfTwo"), ("use_tf32", "0"))))
    assert options_of(cuda_device)["arena_extend_strategy"] == "kNextPowerOfTwo"
    assert options_of(cuda_device)["use_tf32"] == "0"


def test_a_failing_provider_is_an_error_and_not_a_session_on_the_cpu(cuda_device):
    session(ONE)
    assert cuda_device.sessions[-1]["enable_fallback"] is False


def test_a_trial_model_may_have_no_node_on_the_cpu(cuda_device):
    session(ONE)
    assert cuda_device.sessions[-1]["providers"][1:] == ["CPUExecutionProvider"]
    assert not cuda_device.sessions[-1]["whole"]
    session(ONE, refuse_cpu_nodes=True)
    assert cuda_device.sessions[-1]["providers"][1:] == []
    assert cuda_device.sessions[-1]["whole"]


def test_on_one_stream_a_run_waits_for_nothing(cuda_device):
    run = session(ONE)
    (given,) = run([to_ort(torch.arange(3.0))])
    assert given.tolist() == [0, -1, -2]
    assert cuda_device.current.waited_for == []
    assert run._options.get_run_config_entry(cuda.DISABLE_SYNCHRONIZATION) == "1"


def test_a_session_that_is_dropped_waits_for_its_work_to_end(cuda_device):
    run = session(ONE)
    run([to_ort(torch.ones(3))])
    waits = cuda_device.waits
    del run
    assert cuda_device.waits == waits + 1


def test_on_another_stream_each_side_waits_for_the_other(cuda_device):
    run, other = session(ONE), Stream(8192)
    cuda_device.current = other
    run([to_ort(torch.ones(3))])
    assert cuda_device.default.waited_for == [other]
    assert other.waited_for == [cuda_device.default]


def test_a_failed_run_also_waits_for_the_other_stream(cuda_device):
    run, other = session(ONE), Stream(8192)
    cuda_device.current = other
    with pytest.raises(Exception, match="feed"):
        run([])
    assert other.waited_for == [cuda_device.default]


def test_a_run_on_the_cpu_is_waited_for():
    run = Session(model(), ["x"], ["y"], SessionSettings(threads=1))
    with pytest.raises(RuntimeError):
        run._options.get_run_config_entry(cuda.DISABLE_SYNCHRONIZATION)


def test_memory_comes_from_pytorch_and_goes_back(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda *asked: calls.append(asked) or 4096)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda address: calls.append(address))
    addresses = cuda.torch_allocator(3)
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(addresses["gpu_external_alloc"])
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(addresses["gpu_external_free"])
    assert alloc(100) == 4096
    free(4096)
    free(None)
    assert calls == [(100, torch.device("cuda", 3)), 4096]
    assert cuda.torch_allocator(3) == addresses


def test_the_allocator_returns_null_without_memory(monkeypatch):
    def full(size, device):
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", full)
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(cuda.torch_allocator(4)["gpu_external_alloc"])
    assert alloc(100) is None


def test_results_are_allocated_on_the_device():
    found = REAL_ORT_DEVICE(ExecutionDevice("cuda", 2))
    assert (found.device_id(), found.device_type()) == (2, found.cuda())


def test_the_text_of_settings_names_the_device_and_nothing_of_one_process(cuda_device):
    text = str(SessionSettings(threads=1, place=SHARED))
    session(SHARED)
    assert "kind='cuda', index=0" in text
    assert text == str(SessionSettings(threads=1, place=SHARED))
    assert options_of(cuda_device)["gpu_external_alloc"] not in text
