"""`compute.attention` decides who runs attention; the results stay eager's."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ort_accel
from ort_accel.reporting.fallbacks import Reason


class Attention(nn.Module):
    """Self-attention with one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def trained(attention, mask=None):
    """Output, gradient, and the operators that PyTorch ran for attention's sake."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(3, 7, 16)
    expected = model(x, mask)
    expected.square().sum().backward()
    gradient = model.project.weight.grad.clone()
    model.zero_grad()
    ort_accel.accelerate(model, {"version": 1, "compute": {"attention": attention}})
    got = model(x, mask)
    got.square().sum().backward()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(model.project.weight.grad, gradient)
    return [item.op for item in ort_accel.report(model).fallbacks if item.reason is Reason.ATTENTION]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("attention", ["auto", "fused", "flash"])
def test_a_fused_kernel_stays_one_node_in_each_direction(attention, masked):
    mask = torch.rand(3, 1, 7, 7) > 0.3 if masked else None
    ran = trained(attention, mask)
    assert len(ran) == 2
    assert all("scaled_dot_product_lean" in op for op in ran)


@pytest.mark.parametrize("masked", [False, True])
def test_products_stay_inside_onnx_runtime(masked):
    mask = torch.rand(3, 1, 7, 7) > 0.3 if masked else None
    assert trained("products", mask) == []


def test_a_kernel_that_cannot_run_here_is_an_error():
    with pytest.raises(Exception, match="No viable backend"):
        trained("efficient")
