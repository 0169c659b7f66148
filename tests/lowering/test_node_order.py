"""ONNX Runtime runs the operators of a model in the order in which they were lowered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from ort_accel.lowering.node_order import in_running_order
from ort_accel.lowering.onnx_graph import OnnxGraph

SIZE = 8


def products_added(graph: OnnxGraph, count: int = 3) -> list[ir.Value]:
    """A sum to which products are added one after the other, and a result that nothing else reads."""
    inputs = [graph.input(f"input_{index}", torch.empty(SIZE, SIZE)) for index in range(count + 1)]
    alone = graph.op("Sin", inputs[0])
    total = inputs[0].value
    for other in inputs[1:]:
        total = graph.op("Sub", total, graph.op("MatMul", inputs[0], other))
    return [alone, total, graph.op("Cos", inputs[1])]


def ran(model: ir.Model, folder) -> list[str]:
    """The names of the operators in the order in which ONNX Runtime ran them."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    session.run(None, {item.name: np.ones((SIZE, SIZE), np.float32) for item in session.get_inputs()})
    names = [event["name"] for event in json.loads(Path(session.end_profiling()).read_text())]
    return [name.removesuffix("_kernel_time") for name in names if name.endswith("_kernel_time")]


def test_operators_run_in_the_order_in_which_they_were_lowered(tmp_path):
    graph = OnnxGraph(opset=17)
    results = products_added(graph)
    for value in results:
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([SIZE, SIZE])
    lowered = [node.name for node in graph.nodes]
    assert [node.split("_")[0] for node in lowered] == ["Sin", *["MatMul", "Sub"] * 3, "Cos"]
    assert ran(graph.model(results, "segment"), tmp_path) == lowered


def test_a_model_lists_what_is_read_before_its_reader():
    graph = OnnxGraph(opset=17)
    products_added(graph)
    found = in_running_order(graph.nodes)
    place = {node: index for index, node in enumerate(found)}
    assert len(found) == len(graph.nodes)
    for node in found:
        makers = [value.producer() for value in node.inputs]
        assert all(place[maker] < place[node] for maker in makers if maker is not None)


def test_what_a_graph_within_an_operator_reads_comes_before_it():
    read = ir.node("Sin", [ir.Value(name="x")])
    inner = ir.Graph([], [], nodes=[ir.node("Cos", [read.outputs[0]])])
    outer = ir.node("If", [ir.Value(name="condition")], {"then_branch": inner, "else_branch": inner})
    assert in_running_order([read, outer]) == [read, outer]
