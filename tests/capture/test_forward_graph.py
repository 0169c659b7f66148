"""The forward graph as it is before autograd, and what a smaller one may be called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ort_accel.capture.dynamo import capturing
from ort_accel.capture.forward_graph import Tracer, ends_at_graph_break, has_lost_backward
from ort_accel.graph.nodes import user_line


def captured(
    function: Callable[..., Any],
    *inputs: Tensor,
    look: Callable[[fx.GraphModule, Tracer], Any],
    dynamic: bool = True,
) -> list[Any]:
    """What is seen of each graph that Dynamo captures."""
    seen = []

    def backend(module: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        seen.append(look(module, Tracer(given)))
        return module.forward

    with capturing():
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return seen


def test_it_has_whole_operators_with_open_sizes_and_the_users_lines() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    (graph,) = captured(
        lambda x: layer(x * 2), torch.randn(3, 5, 8), look=lambda module, tracer: tracer.trace(module).graph
    )
    names = {str(node.target) for node in graph.nodes}
    assert {"aten.layer_norm.default", "aten.scaled_dot_product_attention.default", "aten.dropout.default"} <= names
    first = next(node for node in graph.nodes if "mul.Tensor" in str(node.target))
    assert user_line(first).startswith("test_forward_graph.py")
    assert any(isinstance(size, torch.SymInt) for size in first.meta["val"].shape)


def test_conditions_on_tables_are_checked_by_us_and_dynamo_is_not_told() -> None:
    def look(module: fx.GraphModule, tracer: Tracer) -> Any:
        rows = torch.arange(4)

        def write(arguments: Sequence[Any]) -> Any:
            *_, x, table = arguments
            return x.index_select(0, table) if table.shape[0] < 6 else x

        tracer.smaller(module, write, [rows])
        holds = tracer.conditions()
        given = [8, 3, torch.randn(8, 3)]
        return [holds([*given, torch.arange(count)]) for count in (3, 4, 5, 6, 7)]

    assert captured(lambda x: x[:, 0] + x[:, 1], torch.randn(8, 3), look=look) == [[True, True, True, False, False]]


def test_a_part_with_a_backward_of_its_own_is_seen() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 3

    x = torch.randn(3, requires_grad=True)
    assert captured(lambda x: Twice.apply(x).sin(), x, look=lambda module, _: has_lost_backward(module)) == [True]
    assert captured(lambda x: x.sin(), x, look=lambda module, _: has_lost_backward(module)) == [False]


def test_a_graph_that_python_goes_on_from_is_told_from_one_that_returns() -> None:
    def broken(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    assert captured(broken, torch.randn(3), look=lambda module, _: ends_at_graph_break(module)) == [True, False]
