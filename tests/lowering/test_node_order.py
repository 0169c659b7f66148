"""ONNX Runtime runs the operators of a model in the order in which they were lowered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from ort_accel.lowering.onnx_graph import OnnxGraph, Operand
from ort_accel.lowering.ops.matmul import addmm, product
from ort_accel.runtime.session import SessionSettings

SIZE = 8


def products_added(graph: OnnxGraph, count: int = 3) -> list[ir.Value]:
    """A sum to which products are added one after the other, and a result that nothing else reads."""
    inputs = [graph.input(f"input_{index}", torch.empty(SIZE, SIZE)) for index in range(count + 1)]
    alone = graph.op("Sin", inputs[0])
    total = inputs[0].value
    for other in inputs[1:]:
        total = graph.op("Sub", total, graph.op("MatMul", inputs[0], other))
    return [alone, total, graph.op("Cos", inputs[1])]


def ran(model: ir.Model, folder, optimize: bool = False) -> list[str]:
    """The names of the operators in the order in which ONNX Runtime ran them."""
    options = SessionSettings(threads=1, optimize=optimize).options()
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
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


def test_products_of_transposes_run_in_their_order_after_optimizations(tmp_path):
    graph = OnnxGraph(opset=17)
    one, other = (graph.input(name, torch.empty(SIZE, SIZE)) for name in ("one", "other"))
    bias = graph.input("bias", torch.empty(SIZE, SIZE))
    turned = Operand(graph.op("Transpose", one, perm=[1, 0]), torch.empty(SIZE, SIZE))
    results = [product(graph, turned, other), addmm(graph, bias, other, turned), graph.op("Cos", one)]
    for value in results:
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([SIZE, SIZE])
    names = ran(graph.model(results, "segment"), tmp_path, optimize=True)
    assert [name.split("_")[0] for name in names] == ["FusedMatMul", "Gemm", "Cos"]
