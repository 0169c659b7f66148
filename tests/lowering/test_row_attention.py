"""Attention over rows gives on any device what PyTorch's fused kernel for the CPU gives, gradients too."""

import pytest
import torch

from ort_accel.lowering import row_operators
from ort_accel.lowering.row_operators import CAUSAL, FULL, MASKED, own


def step(kind, mask, dtype, kept=None, keep=1.0):
    torch.manual_seed(0)
    tensors = [torch.randn(rows, 2, 8, dtype=dtype, requires_grad=True) for rows in (7, 9, 9)]
    spans = torch.tensor([[0, 3, 0, 4, kind], [3, 7, 4, 9, kind]])
    rows = torch.arange(7), torch.arange(9)
    out, logsumexp = own.scaled_dot_product_of_rows(*tensors, spans, *rows, mask, kept, keep, 0.3)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out))
    return [out.detach(), logsumexp.detach(), *(tensor.grad for tensor in tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [FULL, CAUSAL, MASKED], ids=["full", "causal", "masked"])
def test_products_are_the_fused_kernel(kind, dtype, monkeypatch):
    mask = torch.rand(2, 1, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    mask = mask[:, :, None, :].expand(2, 1, 9, 9).contiguous() if kind == MASKED else None
    if mask is not None:
        mask[..., 0] = True
    expected = step(kind, mask, dtype)
    monkeypatch.setitem(row_operators._KERNELS, "cpu", row_operators._KERNELS["cuda"])
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(step(kind, mask, dtype), expected, check_dtype=False, **tolerance)


@pytest.mark.parametrize("operator", [own.rows_of, own.rows_into, own.scaled_dot_product_of_rows])
def test_there_is_a_kernel_for_cuda(operator):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(operator.default.name(), "CUDA")
