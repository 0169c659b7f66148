"""Activations err no more than eager's, forward and backward, and agree with it about infinities and NaN."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ort_accel.native.run_kernel import ELEMENTS, run_kernel
from tests.native.levels import DTYPES, LEVELS, SIZES, assert_as_exact, same_bits, with_special_values

aten = torch.ops.aten


def gelu_tanh(x):
    return functional.gelu(x, approximate="tanh")


FUNCTIONS = {
    "gelu": (0, functional.gelu, aten.gelu_backward),
    "gelu_tanh": (1, gelu_tanh, lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh")),
    "silu": (2, functional.silu, aten.silu_backward),
    "relu": (3, torch.relu, lambda grad, x: aten.threshold_backward(grad, x, 0)),
    "tanh": (4, torch.tanh, aten.tanh_backward),
    "sigmoid": (5, torch.sigmoid, aten.sigmoid_backward),
}
GATES = ("gelu", "gelu_tanh", "silu")
EXACT = {"exp": (6, torch.exp), "erf": (7, torch.erf), "tanh": (4, torch.tanh), "sigmoid": (5, torch.sigmoid)}


def values(count, dtype, spread=3.0):
    torch.manual_seed(count)
    return with_special_values((torch.randn(count) * spread).to(dtype))


def ulps(found, exact):
    """Errors in units of the last digit of the exact result; infinities have to agree."""
    assert torch.equal(found.isinf(), exact.float().isinf())
    last_digit = torch.exp2(torch.frexp(exact.abs().clamp(min=2.0**-126)).exponent.double() - 24)
    finite = found.isfinite()
    return ((found.double() - exact).abs() / last_digit)[finite]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", EXACT)
def test_functions_err_by_less_than_two_units_of_the_last_digit(name, level):
    number, function = EXACT[name]
    bits = torch.arange(-(1 << 31), 1 << 31, 9973, dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.linspace(-105, 89, 200_001), torch.linspace(-1.5, 1.5, 200_001)])
    x = x[~x.isnan()]
    found = torch.empty_like(x)
    run_kernel("activation", number, x, None, 1, len(x), 0, found, level=level)
    exact = function(x.double())
    if name == "sigmoid":  # e^-x is infinite before 1 / e^-x is 0, in eager as well
        found, exact = found[x > -88], exact[x > -88]
    assert ulps(found, exact).max() < (3 if name == "sigmoid" else 2)
    nan = torch.full((20,), torch.nan)
    run_kernel("activation", number, nan, None, 1, 20, 0, nan, level=level)
    assert nan.isnan().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_activation_and_its_gradient(name, count, dtype, level):
    number, forward, backward = FUNCTIONS[name]
    x, grad = values(count, dtype), torch.randn(count).to(dtype)
    if name == "gelu":
        x[x > 1e4] = 5.0  # eager's results are infinite, or even NaN
    out, grad_x = torch.empty_like(x), torch.empty_like(x)
    run_kernel("activation", number, x, None, 1, count, ELEMENTS[dtype], out, level=level)
    assert_as_exact(out, forward(x), forward(x.double()), scale=1.0)
    of = forward(x) if name in ("tanh", "sigmoid") else x
    run_kernel("activation_backward", number, grad, of, None, 1, count, ELEMENTS[dtype], grad_x, level=level)
    assert_as_exact(grad_x, backward(grad, of), backward(grad.double(), of.double()), scale=1.0)
    if name == "relu":
        assert same_bits(out, forward(x))
        assert same_bits(grad_x, backward(grad, of))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_close_to_zero_keep_their_digits(name, level):
    number, forward, _ = FUNCTIONS[name]
    x = torch.tensor([1e-3, -1e-3, 1e-6, -1e-10, 1e-20, -1e-30])
    out = torch.empty_like(x)
    run_kernel("activation", number, x, None, 1, len(x), 0, out, level=level)
    assert torch.allclose(out, forward(x.double()).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (5, 512), (4, 513), (33, 1536)], ids=str)
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu"])
def test_a_bias_is_added_before(name, shape, dtype, level):
    number, forward, backward = FUNCTIONS[name]
    x, grad, bias = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    out, grad_x = torch.empty_like(x), torch.empty_like(x)
    run_kernel("activation", number, x, bias, *shape, ELEMENTS[dtype], out, level=level)
    run_kernel("activation_backward", number, grad, x, bias, *shape, ELEMENTS[dtype], grad_x, level=level)
    biased = x.double() + bias.double()
    assert_as_exact(out, forward(x + bias), forward(biased), scale=1.0)
    assert_as_exact(grad_x, backward(grad, x + bias), backward(grad.double(), biased), scale=1.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (5, 512), (4, 513), (33, 1000)], ids=str)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("halves", [True, False])
def test_a_gate_is_multiplied(halves, name, shape, dtype, level):
    number, forward, _ = FUNCTIONS[name]
    rows, columns = shape
    both, grad = torch.randn(rows, 2 * columns).to(dtype), torch.randn(shape).to(dtype)
    gate, up = both.split(columns, 1)
    gate, up = (gate, up) if halves else (gate.contiguous(), up.contiguous())
    out, stride = torch.empty_like(grad), 2 * columns if halves else columns
    grads = torch.empty_like(both).split(columns, 1) if halves else (torch.empty_like(gate), torch.empty_like(up))
    sizes = rows, columns, stride, stride, ELEMENTS[dtype]
    run_kernel("gated_activation", number, gate, up, *sizes, out, level=level)
    run_kernel("gated_activation_backward", number, grad, gate, up, *sizes, *grads, level=level)

    def both_ways(*given):
        gate, up = (one.detach().clone().requires_grad_() for one in given[1:])
        value = forward(gate) * up
        return value.detach(), *torch.autograd.grad(value, (gate, up), given[0])

    eager, exact = both_ways(grad, gate, up), both_ways(grad.double(), gate.double(), up.double())
    for found, theirs, true in zip((out, *grads), eager, exact, strict=True):
        assert_as_exact(found, theirs, true, scale=1.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_may_be_written_over_operands(dtype, level):
    x, bias = torch.randn(9, 700).to(dtype), torch.randn(700).to(dtype)
    expected, found = torch.empty_like(x), x.clone()
    run_kernel("activation", 0, x, bias, 9, 700, ELEMENTS[dtype], expected, level=level)
    run_kernel("activation", 0, found, bias, 9, 700, ELEMENTS[dtype], found, level=level)
    assert same_bits(found, expected)
