"""What was compiled for a model goes with the model."""

from __future__ import annotations

import gc
from weakref import ref

import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ort_accel
from tests.shape_caches import clear_shape_caches


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu().sum()


def backends() -> set[int]:
    return set(eval_frame.cached_backends)


def trained() -> list[ref[object]]:
    """References to a model and to what runs it, of which nothing else is left."""
    model = ort_accel.accelerate(Plain())
    for rows in (2, 3):
        model(torch.randn(rows, 3)).backward()
    return [ref(model), ref(model._compiled_call_impl), ref(model._compiled_call_impl.backend)]


def test_deleting_a_model_frees_its_compiled_graphs() -> None:
    trained()  # Dynamo keeps something of the last compilation
    gc.collect()
    before = backends()
    gone = trained()
    trained()
    gc.collect()
    assert [kind() for kind in gone] == [None, None, None]
    assert backends() == before


def test_deleting_a_model_frees_the_shapes_it_was_traced_with() -> None:
    """Fake tensors of dynamic sizes hold them from C++."""

    def shapes() -> int:
        clear_shape_caches()
        gc.collect()
        return sum(type(item) is ShapeEnv for item in gc.get_objects())

    trained()  # Dynamo keeps something of the last compilation
    before = shapes()
    trained()
    trained()
    assert shapes() <= before


def test_restoring_a_model_frees_its_compiled_graphs() -> None:
    model = ort_accel.accelerate(Plain())
    model(torch.randn(2, 3)).backward()
    backend = ref(model._compiled_call_impl.backend)
    ort_accel.restore(model)
    trained()
    gc.collect()
    assert backend() is None
    assert model(torch.ones(2, 3)).isfinite()


def test_a_backward_runs_after_its_model_was_deleted() -> None:
    model = ort_accel.accelerate(Plain())
    weight, x = model.linear.weight, torch.randn(2, 3)
    expected = torch.autograd.grad((x @ weight.T + model.linear.bias).relu().sum(), weight)[0]
    loss = model(x)
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None
    loss.backward()
    torch.testing.assert_close(weight.grad, expected)
