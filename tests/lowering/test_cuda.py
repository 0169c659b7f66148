"""What ONNX Runtime runs of a graph on a CUDA device is asked of its CUDA kernels, and dropouts draw as there."""

import operator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.partition.assign import NodeRules
from ort_accel.passes.options import PassOptions
from ort_accel.passes.split_dropout import split_dropout
from ort_accel.reporting.fallbacks import Reason
from ort_accel.runtime import cuda
from ort_accel.runtime.device import ExecutionDevice
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions

aten = torch.ops.aten


def traced(function, *shapes, device="cuda:0"):
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape, device=device) for shape in shapes)).graph


def refusals(graph):
    assigner = NodeRules(17, Sessions(SessionSettings(threads=1, place=ExecutionDevice("cuda", 0))))
    return {node.target: assigner.refusal(node) for node in graph.nodes if node.op == "call_function"}


def test_each_kind_of_node_is_tried_on_the_cuda_provider_alone(cuda_device):
    graph = traced(lambda x, y: torch.relu(x @ y).sum(0), (3, 4), (4, 5))
    assert set(refusals(graph).values()) == {None}
    assert len(cuda_device.sessions) == 3
    for made in cuda_device.sessions:
        assert made["whole"]
        assert [name for name, _ in made["providers"]] == [cuda.PROVIDER]


def test_what_the_provider_refuses_pytorch_runs(cuda_device, monkeypatch):
    import onnxruntime

    def refuse(*_, **__):
        raise RuntimeError("fallback to CPU EP has been explicitly disabled")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    [refusal] = refusals(traced(torch.relu, (2,))).values()
    assert "fallback to CPU" in refusal.detail


def test_a_tensor_on_the_cpu_stays_with_pytorch(cuda_device):
    [refusal] = refusals(traced(torch.relu, (2,), device="cpu")).values()
    assert refusal.reason is Reason.ELSEWHERE
    assert refusal.detail == "a tensor on cpu"
    assert refusal.reason.is_choice


def test_figures_measured_on_a_cpu_do_not_count_there(cuda_device):
    graph = traced(torch.ops.aten.gelu_backward, (1024, 1536), (1024, 1536))
    assert refusals(graph) == {aten.gelu_backward.default: None}


def test_a_dropout_on_cuda_draws_its_mask_by_the_devices_own_dropout():
    with FakeTensorMode():
        x = torch.empty((2, 3, 4), device="cuda", dtype=torch.float16).transpose(0, 1)
        module = make_fx(lambda x: aten.native_dropout(x, 0.3, True))(x)
    assert split_dropout(module.graph, PassOptions()) == 1
    module.graph.lint()
    [draw] = module.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    blank, probability, _ = draw.args
    assert probability == 0.3
    assert blank.target is aten.empty.memory_format
    assert blank.kwargs == {"dtype": torch.float16, "device": torch.device("cuda", 0)}
    assert blank.args == ([2, 3, 4],)  # as the operand lies
    assert [user.target for user in draw.users] == [operator.getitem]
    [applied] = module.graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default)
    assert applied.meta["val"].dtype == torch.float16
    assert applied.args[1].meta["val"].shape == (3, 2, 4)
    assert not module.graph.find_nodes(op="call_function", target=aten.bernoulli.p)
