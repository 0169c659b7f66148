"""Results of PyTorch's operators are written over dead operands, and over no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ort_accel
from ort_accel.compiler.compile_graph import Lowering, lower_graph
from ort_accel.executor import torch_segment
from ort_accel.executor.reuse_operands import reusable_operands
from ort_accel.executor.torch_segment import PyTorchSegment
from ort_accel.graph.nodes import is_view
from ort_accel.partition.segments import Body
from ort_accel.reporting.report import Report
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions
from tests.against_eager import assert_step_as_eager

Function = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

REPLACED: dict[str, tuple[Function, list[str]]] = {
    "a product that is added to": (lambda a, b: (a @ b + a,), ["add"]),
    "one after the other": (lambda a, b: (((a @ b + a) * b).tanh(),), ["add", "mul", "tanh"]),
    "the second operand": (lambda a, b: (a + a @ b,), ["add"]),
    "through views": (lambda a, b: ((a @ b).view(2, 2, 4) + a.view(2, 2, 4),), ["add"]),
    "a part of it": (lambda a, b: ((a @ b)[1:3] + a[1:3],), ["add"]),
    "read before": (lambda a, b: next((c.sum(), c + a) for c in [a @ b]), ["add"]),
    "twice the same": (lambda a, b: next((c + c,) for c in [a @ b]), ["add"]),
}

KEPT: dict[str, Function] = {
    "an input": lambda a, b: (a + b,),
    "a view of an input": lambda a, b: (a.view(2, 8) + b.view(2, 8),),
    "what is wanted": lambda a, b: next((c, c + a) for c in [a @ b]),
    "what a wanted view shows": lambda a, b: next((c.t(), c + a) for c in [a @ b]),
    "what is read later": lambda a, b: next((d, c @ d) for c in [a @ b] for d in [c + a]),
    "what another view shows later": lambda a, b: next((d, v @ d) for c in [a @ b] for v in [c.t()] for d in [c + a]),
    "a smaller one": lambda a, b: ((a @ b)[:1] + a,),
    "another type": lambda a, b: ((a @ b).double() + a.double(),),
    "a transposed one": lambda a, b: ((a @ b).t() + a,),
    "for what is no work by element": lambda a, b: ((a @ b) @ b,),
    "for a draw": lambda a, b: (torch.normal(a @ b, b.abs()),),
    "beside what it shows in another order": lambda a, b: next((c.t() + c,) for c in [a.t().tanh()]),
    "an expanded one": lambda a, b: ((a @ b)[:1].expand(4, 4) + a,),
}


def segment(function: Function) -> tuple[PyTorchSegment, dict[fx.Node, fx.Node]]:
    """Returns a function as a segment, and the operands that results are written over."""
    module = make_fx(function, tracing_mode="fake")(*inputs())
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    wanted = list(module.graph.output_node().args[0])
    body = Body(module.graph.find_nodes(op="placeholder"), nodes)
    return PyTorchSegment(body, wanted, module, dead_inputs=()), reusable_operands(nodes, wanted)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4)


def check(function: Function) -> list[str]:
    """Checks results and inputs of a segment. Returns the operators that write into an operand."""
    run, replaced = segment(function)
    for _ in range(2):
        given = inputs()
        torch.manual_seed(1)
        results = run(list(given), {})
        torch.manual_seed(1)
        for found, expected in zip(results, function(*given), strict=True):
            assert torch.equal(found, expected)
        assert all(map(torch.equal, given, inputs()))
    return [operator_of(node) for node in replaced]


@pytest.mark.parametrize("name", REPLACED)
def test_a_dying_operand_is_replaced(name: str) -> None:
    function, operators = REPLACED[name]
    assert check(function) == operators


@pytest.mark.parametrize("name", KEPT)
def test_others_are_kept(name: str) -> None:
    assert check(KEPT[name]) == []


@dataclass(frozen=True)
class Divided:
    """A function of which PyTorch runs some operators, and what then is written over: which operator's operand, and
    which operator made that."""

    function: Function
    pytorch: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]


ACROSS = {
    "a product of ONNX Runtime": Divided(lambda a, b: (a @ b + a,), ("add",), (("add", "mm"),)),
    "what PyTorch made before": Divided(
        lambda a, b: next((c + (c @ b).exp(),) for c in [a.tanh()]), ("tanh", "add"), (("add", "tanh"),)
    ),
    "through views": Divided(lambda a, b: ((a @ b).view(2, 8) + a.view(2, 8),), ("add",), (("add", "mm"),)),
    "no other result of ONNX Runtime": Divided(lambda a, b: ((a * b).exp() + a,), ("add",), ()),
    "nothing that is wanted": Divided(lambda a, b: next((c, c + a) for c in [a @ b]), ("add",), ()),
    "nothing that is read later": Divided(lambda a, b: next((c @ d,) for c in [a @ b] for d in [c + a]), ("add",), ()),
    "nothing that a view shows later": Divided(
        lambda a, b: next((d @ v,) for c in [a @ b] for v in [c.t()] for d in [c + (v @ b).exp()]), ("t", "add"), ()
    ),
    "nothing that a part of views shows later": Divided(
        lambda a, b: next((v[0] @ d,) for c in [a @ b] for v in [c.split(2)] for d in [c + (v[1] @ a).sin().sum()]),
        ("split", "add"),
        (),
    ),
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_another_segment_made_is_replaced_when_nobody_needs_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = ACROSS[name]
    found: list[tuple[str, str]] = []

    def watched(*args: Any) -> dict[fx.Node, fx.Node]:
        replaced = reusable_operands(*args)
        for node, operand in replaced.items():
            while is_view(operand):
                operand = operand.all_input_nodes[0]
            found.append((operator_of(node), operator_of(operand)))
        return replaced

    monkeypatch.setattr(torch_segment, "reusable_operands", watched)
    module = make_fx(lambda *given: list(case.function(*given)), tracing_mode="fake")(*inputs())
    unwanted = frozenset(f"aten.{name}" for name in case.pytorch)
    lowering = Lowering(Sessions(SessionSettings(threads=1)), 20, Report(), unwanted=unwanted, for_speed=False)
    program = lower_graph(module, lowering, "forward 0")
    for _ in range(2):
        given = inputs()
        torch.testing.assert_close(program(list(given)), list(case.function(*given)))
        assert all(map(torch.equal, given, inputs()))
    assert tuple(found) == case.replaced


def operator_of(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


class Residual(nn.Module):
    """Gradients meet at every residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * 0.5
        return x.square().mean()


def test_a_model_gives_eagers_gradients() -> None:
    torch.manual_seed(0)
    eager = Residual()
    names = ["mm", "addmm", "add", "mul", "gelu", "gelu_backward"]
    operators = [f"aten.{name}.{'Tensor' if name in ('add', 'mul') else 'default'}" for name in names]
    engine = {"engine": {"run_in_pytorch": operators}, "observe": {"log_level": "error"}}
    ours = ort_accel.accelerate(copy.deepcopy(eager), engine)
    for length in (5, 9, 7, 3):
        assert_step_as_eager(eager, ours, torch.randn(2, length, 16))
