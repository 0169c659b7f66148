"""NaN, infinities and overflow come out as in eager mode, in every type that ONNX Runtime has kernels for."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.lowering.through_ort import Lowered, assert_like_eager

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
NUMBERS = [
    NAN,
    INF,
    -INF,
    -0.0,
    0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -1.5,
    -2.5,
    -1,
    1,
    20,
    -20,
    100,
    -100,
    0.3,
    -0.3,
    88.7,
    -88.7,
    NAN,
]
INTEGERS = [0, 1, 2, 3, 5, 7, 100, -1, -2, -7, 127, -128]
FLOATS = [torch.float32, torch.float64, torch.float16]
INTEGER_TYPES = [torch.int64, torch.int32]

ROUNDING = ["floor", "ceil", "round", "trunc", "frac"]
POWERS = ["exp", "log", "sqrt", "rsqrt", "reciprocal", "log1p", "expm1", "exp2", "log2", "log10"]
WAVES = ["sin", "cos", "tanh", "sigmoid", "erf", "atan", "sinh", "cosh"]
SIGNS = ["neg", "abs", "sign", "sgn", "relu", "isnan", "isinf", "nan_to_num", "logical_not"]
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": functional.silu,
    "softplus": functional.softplus,
    "logsigmoid": functional.logsigmoid,
    "elu": functional.elu,
    "celu": lambda x: functional.celu(x, 0.7),
    "leaky_relu": functional.leaky_relu,
    "relu6": functional.relu6,
    "hardsigmoid": functional.hardsigmoid,
    "hardshrink": functional.hardshrink,
    "softshrink": functional.softshrink,
    "threshold": lambda x: functional.threshold(x, 0.4, 7),
}
BINARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(torch, name) for name in ("maximum", "minimum", "fmax", "fmin", "logical_and", "logical_xor")},
    "where": lambda a, b: torch.where(a > b, a, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 2),
}
ROWS: dict[str, Callable[..., Any]] = {
    **{name: lambda x, name=name: getattr(x, name)(1) for name in ("sum", "amax", "amin", "mean", "argmax", "cumsum")},
    **{name: lambda x, name=name: getattr(x, name)() for name in ("max", "min", "argmin", "sum")},
    "max of rows": lambda x: x.max(1),
    "min of rows": lambda x: x.min(1, keepdim=True),
    "any": lambda x: x.any(1),
    "all": lambda x: x.all(0, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "safe_softmax": lambda x: aten._safe_softmax(x, 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "nansum": lambda x: x.nansum(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "largest": lambda x: torch.linalg.vector_norm(x, math.inf, dim=1),
}


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(NUMBERS).repeat(3).to(dtype) if dtype.is_floating_point else torch.tensor(INTEGERS).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    one = numbers(dtype)[:22]
    return one.repeat_interleave(len(one)), one.repeat(len(one))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ROUNDING + POWERS + WAVES + SIGNS)
def test_functions_of_one_number(name: str, dtype: torch.dtype) -> None:
    x = numbers(dtype)
    if name == "rsqrt":
        x = x + 0  # onnxruntime-training has no negative zero here
    assert_like_eager(getattr(torch, name), x, ort=dtype == torch.float32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: torch.dtype) -> None:
    assert_like_eager(ACTIVATIONS[name], numbers(dtype), ort=dtype == torch.float32)


def test_gelu_of_nan_and_large_numbers() -> None:
    x = torch.tensor([NAN, -100.0, -5, 0, 5, 100])  # eager gives NaN for infinity, ONNX Runtime infinity
    assert_like_eager(functional.gelu, x)
    assert_like_eager(lambda x: functional.gelu(x, approximate="tanh"), x)


@pytest.mark.parametrize("dtype", FLOATS + INTEGER_TYPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name: str, dtype: torch.dtype) -> None:
    assert_like_eager(BINARY[name], *pairs(dtype), ort=dtype == torch.float32)


@pytest.mark.parametrize("dtype", FLOATS + INTEGER_TYPES, ids=str)
@pytest.mark.parametrize("number", [2, 2.5, -0.5, True])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "eq", "lt", "ge"])
def test_a_tensor_and_a_number(name: str, number: float, dtype: torch.dtype) -> None:
    if name == "sub" and number is True:
        pytest.skip("eager does not subtract a truth value")
    assert_like_eager(lambda x: BINARY[name](x, number), numbers(dtype), ort=False)


@pytest.mark.parametrize("exponent", [2, 3, 4, 0.5, -0.5, -1, -2, 1, 0, 1.7, INF])
def test_powers(exponent: float) -> None:
    assert_like_eager(lambda x: x**exponent, numbers(torch.float32) + 0)


@pytest.mark.parametrize("low", [-1.0, 3.0, None])
@pytest.mark.parametrize("high", [2.0, INF])
def test_clamping_keeps_nan(low: float | None, high: float) -> None:
    x = numbers(torch.float32)
    assert_like_eager(lambda x: x.clamp(low, high), x)
    assert_like_eager(lambda x: x.clamp_max(high), x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    rows = numbers(dtype).reshape(-1, 6)
    try:
        ROWS[name](rows)
    except RuntimeError:
        pytest.skip(f"eager has no {name} in {dtype}")
    assert_like_eager(ROWS[name], rows, ort=False, atol=1e-4 if dtype == torch.float16 else None)


def test_a_row_of_minus_infinity() -> None:
    row = torch.full((3, 4), -INF)
    row[1, 2] = 0
    for function in (ROWS["softmax"], ROWS["safe_softmax"], ROWS["log_softmax"], ROWS["logsumexp"], ROWS["amax"]):
        assert_like_eager(function, row)


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
@pytest.mark.parametrize("divisor", [3, -3, 0.7])
def test_division_and_remainder_round_as_in_eager(mode: str | None, divisor: float) -> None:
    for x in (numbers(torch.float32), numbers(torch.int64)):
        assert_like_eager(lambda x: torch.div(x, divisor, rounding_mode=mode), x)
        assert_like_eager(lambda x: (x % divisor, torch.fmod(x, divisor), x // divisor), x)


def test_integers_are_not_divided_by_what_may_be_zero() -> None:
    """ONNX Runtime's kernel would end the process, where PyTorch raises."""
    ten, zero = torch.tensor([10, 10]), torch.tensor([3, 0])
    lowered = Lowered(lambda a, b: (a // b, a % b), (ten, torch.tensor([3, 4])))
    assert set(lowered.refusals) == {"aten.floor_divide.default", "aten.remainder.Tensor"}
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        lowered(ten, zero)


def test_integers_wrap_around() -> None:
    near = torch.tensor([2**63 - 1, -(2**63), 5])
    assert_like_eager(lambda x: (x + 1, x - 1, x * 3, -x, x.abs()), near)


def test_floats_become_integers_as_in_eager() -> None:
    x = torch.tensor([0.9, -0.9, 2.5, -2.5, 1e9, -1e9])
    assert_like_eager(lambda x: (x.long(), x.int(), x.bool(), x.double()), x)


def test_truth_values() -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert_like_eager(lambda a, b: (a + b, a * b, a & b, a | b, a ^ b, ~a, a == b), a, b)
    assert_like_eager(lambda a, b: (a.sum(), a.cumsum(0), a + 1, a * 2.5, a.any(), b.all()), a, b)


@pytest.mark.parametrize("mean", [10.0, 1e3, 1e4])
def test_layer_norm_withstands_a_large_mean(mean: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 384) + mean
    (ours,) = Lowered(lambda x: functional.layer_norm(x, [384]), (x,))(x)
    exact = functional.layer_norm(x.double(), [384])
    eager = functional.layer_norm(x, [384])
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-5


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bfloat16])
def test_a_sigmoid_is_exact_far_from_zero(dtype: torch.dtype) -> None:
    """A ranking loss takes its logarithm."""
    x = torch.tensor([-80.0, -30, -20, -17, -9, 0, 17, 30], dtype=dtype)
    (found,) = Lowered(torch.sigmoid, [x])(x)
    torch.testing.assert_close(found, torch.sigmoid(x), rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)


def test_the_remainder_of_large_integers_is_exact() -> None:
    x = torch.tensor([2**53 + 1, -(2**53) - 1, 2**62 + 5, -7, 7, 0])
    assert_like_eager(lambda x: (torch.fmod(x, 3), torch.fmod(x, -5)), x)


def test_a_truth_over_no_dimension_is_one_of_each_element() -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    assert_like_eager(lambda x: (torch.any(x, dim=()), torch.all(x, dim=())), x)


def test_the_logarithm_of_a_power_is_whole() -> None:
    powers = torch.arange(40.0)
    assert_like_eager(lambda x: torch.log2(x).floor(), 2**powers)
    assert_like_eager(lambda x: torch.log10(x).floor(), 10 ** powers[:11])
