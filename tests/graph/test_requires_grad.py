"""A traced graph does not tell which values have a gradient; it is found from the inputs."""

from __future__ import annotations

from torch import Tensor, nn, ones, randn
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.graph.requires_grad import has_gradient, mark_gradients


def gradients(function: object, *inputs: Tensor) -> list[bool]:
    """For each output, whether it has a gradient."""
    graph = make_fx(function, pre_dispatch=True)(*inputs).graph
    mark_gradients(graph, inputs)
    return [has_gradient(node) for node in graph.output_node().args[0]]


def test_a_value_computed_from_a_parameter_has_a_gradient() -> None:
    weight = nn.Parameter(ones(3))
    assert gradients(lambda x, w: (x * w, x + 1, (x * w).sin()), randn(3), weight) == [True, False, True]


def test_a_detached_or_integer_value_has_no_gradient() -> None:
    weight = nn.Parameter(ones(3))
    found = gradients(lambda x, w: ((x * w).detach(), (x * w).argmax(), (x * w) > 0, x * w.detach()), randn(3), weight)
    assert found == [False] * 4
