"""The operator for bitsandbytes' 4-bit linear layers against bitsandbytes' own dequantization and a product."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ort_accel.kernels import linear_4bit as operator
from ort_accel.native.library import native_library

four_bit = pytest.importorskip("bitsandbytes.functional")

SHAPES = [(1, 3, 64), (9, 7, 128), (33, 50, 192), (150, 64, 576), (40, 290, 64)]
"""Rows, and the outputs and inputs of a layer."""
KINDS = [(kind, nested) for kind in ("nf4", "fp4") for nested in (False, True)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_kind = pytest.mark.parametrize(("kind", "nested"), KINDS)


def quantized(outputs: int, inputs: int, kind: str, nested: bool, block: int = 64, dtype=torch.float32):
    torch.manual_seed(outputs)
    weight = (torch.randn(outputs, inputs) / math.sqrt(inputs)).to(dtype)
    return four_bit.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=nested)


def arguments(packed: Tensor, state) -> tuple[tuple, tuple]:
    """The arguments before the bias, and those behind it."""
    first = state.state2.absmax if state.nested else state.absmax
    more = (state.absmax, state.state2.code, state.offset) if state.nested else (None, None, None)
    return (packed, list(state.shape), first, state.blocksize, state.quant_type), (*more, state.dtype)


def ours(x: Tensor, packed: Tensor, state, bias: Tensor | None = None) -> Tensor:
    weight, more = arguments(packed, state)
    return operator.linear_4bit(x, *weight, bias, *more)


def weight_as(dtype: torch.dtype, packed: Tensor, state) -> Tensor:
    """The weight, dequantized to a type by bitsandbytes."""
    scales = four_bit.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    arguments = packed, scales, state.blocksize, state.quant_type, state.shape, dtype
    return torch.ops.bitsandbytes.dequantize_4bit.default(*arguments)


def assert_errs_as_eager(found: Tensor, eager: Tensor, exact: Tensor, magnitude: Tensor, terms: int) -> None:
    """Checks the error against eager's and against that of a sum in single precision, whatever its order.

    Roundings of a sum walk at random: by the square root of the number of its terms, in units of half a float's
    precision of the sum of the magnitudes. Eager adds in many partial sums and is mostly better than that, one sum that
    runs through all terms is not.
    """
    assert found.dtype == eager.dtype
    assert found.shape == eager.shape
    mine, theirs = ((one.double() - exact).abs().max() for one in (found, eager))
    of_sum = math.sqrt(terms) * torch.finfo(torch.float32).eps / 2 * magnitude.max()
    assert mine <= max(4 * theirs, 4 * torch.finfo(found.dtype).eps * exact.abs().max(), of_sum)


@each_shape
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("native", [True, False])
def test_output_and_gradients_are_those_of_the_dequantized_weight(shape, kind, nested, dtype, stored, native):
    rows, outputs, inputs = shape
    packed, state = quantized(outputs, inputs, kind, nested, dtype=stored)
    x, grad, bias = torch.randn(2, rows, inputs), torch.randn(2, rows, outputs), torch.randn(outputs)
    x, grad, bias = (tensor.to(dtype) for tensor in (x, grad, bias))
    x.requires_grad_(), bias.requires_grad_()
    library = native_library() if native else None
    with patch.object(operator, "native_library", lambda: library):
        found = ours(x, packed, state, bias)
        to_x, to_bias = torch.autograd.grad(found, (x, bias), grad)
    weight = weight_as(dtype, packed, state)
    wide = x.double(), weight.double(), bias.double()
    magnitude = functional.linear(*(tensor.abs() for tensor in wide))
    assert_errs_as_eager(found, functional.linear(x, weight, bias), functional.linear(*wide), magnitude, inputs + 1)
    weight = four_bit.dequantize_4bit(packed, state).to(dtype)
    wide = grad.double(), weight.double()
    assert_errs_as_eager(to_x, grad @ weight, wide[0] @ wide[1], wide[0].abs() @ wide[1].abs(), outputs)
    assert_errs_as_eager(to_bias, grad.sum((0, 1)), wide[0].sum((0, 1)), wide[0].abs().sum((0, 1)), 2 * rows)


@each_kind
@pytest.mark.parametrize("block", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("rows", [8, 512], ids=["few rows", "many rows"])
def test_the_weight_is_bitsandbytes_to_the_bit(kind, nested, block, rows):
    packed, state = quantized(40, 512, kind, nested, block)
    weight, unit = four_bit.dequantize_4bit(packed, state), torch.eye(512)[:rows]
    assert torch.equal(ours(unit, packed, state), weight.t()[:rows])
    before, behind = arguments(packed, state)
    assert torch.equal(operator.linear_4bit_backward(torch.eye(40), *before, *behind), weight)


def test_a_block_that_goes_on_in_a_second_row_is_left_to_bitsandbytes():
    packed, state = quantized(5, 96, "nf4", nested=True)
    x = torch.randn(3, 96)
    assert not operator.has_kernel(x, state.shape, state.blocksize)
    torch.testing.assert_close(ours(x, packed, state), functional.linear(x, weight_as(x.dtype, packed, state)))


def test_no_rows():
    packed, state = quantized(5, 64, "nf4", nested=False)
    assert ours(torch.randn(0, 64), packed, state).shape == (0, 5)


@pytest.mark.parametrize(("precision", "error"), [("highest", 1e-6), ("high", 1e-4), ("medium", 2e-2)])
def test_floats_have_the_precision_that_pytorch_allows(precision, error):
    packed, state = quantized(96, 256, "nf4", nested=False)
    x = torch.randn(64, 256)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        found = ours(x, packed, state)
    finally:
        torch.set_float32_matmul_precision(before)
    exact = functional.linear(x.double(), four_bit.dequantize_4bit(packed, state).double())
    assert (found - exact).abs().max() <= error * exact.abs().max()
