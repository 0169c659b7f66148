"""Formulas of terms, run by ONNX Runtime."""

import onnx_ir as ir
import pytest
import torch

from ort_accel.lowering.onnx_graph import OnnxGraph
from ort_accel.lowering.term import term
from ort_accel.runtime.dlpack import to_ort
from ort_accel.runtime.session import Session, SessionSettings

FORMULAS = {
    "number on the right": lambda x: (x + 1) * 2 - 0.5 / (x / 3 + 4),
    "number on the left": lambda x: 1 - (2 + 3 * x),
    "sign and size": lambda x: -x + abs(x),
}


def through_ort(formula, numbers):
    graph = OnnxGraph(opset=17)
    result = formula(term(graph, graph.input("x", numbers))).value
    result.name = "y"
    model = ir.to_proto(graph.model([result], "formula")).SerializeToString()
    return Session(model, ["x"], ["y"], SessionSettings(threads=1))([to_ort(numbers)])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_computes_what_torch_computes(name, dtype):
    numbers = torch.tensor([-2.5, -1.0, 0.0, 0.25, 7.0], dtype=dtype)
    torch.testing.assert_close(through_ort(FORMULAS[name], numbers), FORMULAS[name](numbers))


def test_where_takes_a_term_or_a_number():
    numbers = torch.tensor([-1.0, 0.0, 1.0])
    assert torch.equal(through_ort(lambda x: x.where(x > 0, 5), numbers), torch.where(numbers > 0, numbers, 5))


@pytest.mark.parametrize("compare", ["__lt__", "__le__", "__gt__", "__ge__"])
def test_a_comparison_is_true_where_torchs_is(compare):
    numbers = torch.tensor([-1.0, 0.0, 1.0])
    found = through_ort(lambda x: getattr(x, compare)(0), numbers)
    assert torch.equal(found, getattr(numbers, compare)(0))
