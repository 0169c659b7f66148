"""The bytes that attention takes while it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.kernels.attention_slim import SLIM_BACKWARD, SLIM_FORWARD
from ort_accel.operators.facts import facts

SHAPE = (2, 3, 8, 4)
WIDE = 2 * 3 * 8 * 4 * 4
"""The bytes of one operand in single precision."""


def forward(one: Tensor, sums: Tensor) -> object:
    return SLIM_FORWARD(one, one + 1, one + 2, None, False, None)


def backward(one: Tensor, sums: Tensor) -> object:
    return SLIM_BACKWARD(one, one + 1, one + 2, one + 3, one + 4, sums, None, False, None)


@pytest.mark.parametrize(
    ("function", "dtype", "values"),
    [
        (forward, torch.float32, 0),
        (forward, torch.bfloat16, 0),
        (forward, torch.float16, 3 + 1),
        (backward, torch.float32, 0),
        (backward, torch.bfloat16, 5 + 3),
        (backward, torch.float16, 5 + 3),
    ],
)
def test_casts_to_single_precision_count(function: Callable[..., object], dtype: torch.dtype, values: int) -> None:
    graph = make_fx(function, tracing_mode="fake")(torch.ones(SHAPE, dtype=dtype), torch.ones(SHAPE[:3])).graph
    (node,) = [node for node in graph.nodes if "scaled_dot_product_lean" in str(node.target)]
    formula = facts(node).pytorch_workspace
    assert formula is not None
    assert formula(node) == values * WIDE
