"""The operators for bitsandbytes' 8-bit linear layers against bitsandbytes' own functions."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ort_accel.kernels import linear_8bit as operator
from ort_accel.native.library import native_library

bitsandbytes = pytest.importorskip("bitsandbytes")
from bitsandbytes.autograd._functions import MatMul8bitFp, MatMul8bitLt, MatmulLtState  # noqa: E402

SHAPES = [(1, 3, 5), (9, 7, 128), (33, 50, 191), (150, 64, 576), (40, 290, 64)]
"""Rows, and the outputs and inputs of a layer."""
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def quantized(outputs: int, inputs: int) -> MatmulLtState:
    torch.manual_seed(outputs)
    state = MatmulLtState()
    state.has_fp16_weights = False
    weight = (torch.randn(outputs, inputs) / math.sqrt(inputs)).half()
    state.CB, state.SCB, _ = bitsandbytes.functional.int8_vectorwise_quant(weight)
    return state


def dequantized(state: MatmulLtState, dtype: torch.dtype) -> Tensor:
    """The weight as bitsandbytes computes it."""
    identity = torch.eye(state.CB.shape[1], dtype=dtype)
    return MatMul8bitFp.apply(identity, state.CB, None, None, state).t()


def assert_close(found: Tensor, wanted: Tensor, exact: Tensor, terms: int) -> None:
    """Checks that a product errs by its type's rounding, or as a sum of so many terms does in single precision."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    rounding = torch.finfo(found.dtype).eps * 4 + torch.finfo(torch.float32).eps * terms
    assert (found.double() - exact).abs().max() <= rounding * exact.abs().max() + 1e-6


@each_shape
@each_type
@pytest.mark.parametrize("native", [True, False])
def test_output_and_gradients_are_those_of_the_dequantized_weight(shape, dtype, native):
    rows, outputs, inputs = shape
    state = quantized(outputs, inputs)
    x, grad, bias = torch.randn(2, rows, inputs), torch.randn(2, rows, outputs), torch.randn(outputs)
    x, grad, bias = (tensor.to(dtype) for tensor in (x, grad, bias))
    x.requires_grad_(), bias.requires_grad_()
    library = native_library() if native else None
    with patch.object(operator, "native_library", lambda: library):
        found = operator.linear_8bit(x, state.CB, state.SCB, bias)
        to_x, to_bias = torch.autograd.grad(found, (x, bias), grad)
    wanted = MatMul8bitFp.apply(x, state.CB, None, bias, state)
    weight = dequantized(state, dtype).double()
    assert_close(found, wanted, functional.linear(x.double(), weight, bias.double()), inputs)
    (to_x_of_eager,) = torch.autograd.grad(wanted, x, grad)
    assert_close(to_x, to_x_of_eager, grad.double() @ weight, outputs)
    assert_close(to_bias, bias, grad.double().sum((0, 1)), 2 * rows)


@pytest.mark.parametrize("rows", [8, 96], ids=["few rows", "many rows"])
def test_the_weight_is_bitsandbytes_to_the_bit(rows):
    state = quantized(40, 96)
    weight = dequantized(state, torch.float32)
    unit = torch.eye(96)[:rows]
    assert torch.equal(operator.linear_8bit(unit, state.CB, state.SCB, None), weight.t()[:rows])
    assert torch.equal(operator.linear_8bit_backward(torch.eye(40), state.CB, state.SCB), weight)


@each_type
@pytest.mark.parametrize("threshold", [0.0, 2.5], ids=["no outliers", "outliers"])
@pytest.mark.parametrize("dims", [(12,), (3, 4)], ids=str)
def test_an_evaluated_layer_quantizes_its_input_as_bitsandbytes_does(dtype, threshold, dims):
    state = quantized(20, 64)
    state.threshold = threshold
    x, bias = torch.randn(*dims, 64).to(dtype).requires_grad_(), torch.randn(20).to(dtype)
    found = operator.linear_8bit_mixed(x, state.CB, state.SCB, bias, threshold)
    wanted = MatMul8bitLt.apply(x, state.CB, None, bias, state)
    assert torch.equal(found, wanted)
    grad = torch.randn(*dims, 20).to(dtype)
    to_x, to_x_of_eager = (torch.autograd.grad(result, x, grad)[0] for result in (found, wanted))
    torch.testing.assert_close(to_x, to_x_of_eager, atol=1e-2 if dtype != torch.float32 else 1e-5, rtol=1e-2)


def test_no_rows():
    state = quantized(5, 64)
    for result in (
        operator.linear_8bit(torch.randn(0, 64), state.CB, state.SCB, None),
        operator.linear_8bit_mixed(torch.randn(2, 0, 64), state.CB, state.SCB, None, 0.0),
    ):
        assert result.shape[-1] == 5
        assert not result.numel()
