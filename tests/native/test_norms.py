"""Layer norm and RMS norm, forward and backward, err no more than eager's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ort_accel.native.run_kernel import ELEMENTS, run_kernel
from tests.native.levels import DTYPES, LEVELS, assert_as_exact, same_bits

SHAPES = [
    (0, 8),
    (1, 1),
    (1, 7),
    (3, 1),
    (5, 3),
    (4, 16),
    (7, 33),
    (2, 100),
    (64, 384),
    (70, 769),
    (3, 5000),
    (33, 1024),
]
EPS = 1e-5


def operands(rows, columns, dtype, offset=0.0):
    torch.manual_seed(rows + columns)
    x, grad = (torch.randn(rows, columns) + offset).to(dtype), torch.randn(rows, columns).to(dtype)
    return x, grad, (torch.rand(columns) + 0.5).to(dtype), torch.randn(columns).to(dtype)


def ours_forward(x, weight, bias, level, residual=None):
    rows, columns = x.shape
    out, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    mean, rstd = torch.empty(rows), torch.empty(rows)
    element, of_weight = ELEMENTS[x.dtype], ELEMENTS[(x if weight is None else weight).dtype]
    sizes = rows, columns, EPS, element, of_weight, total, out
    if bias is False:
        run_kernel("rms_norm", x, residual, weight, *sizes, rstd, level=level)
    else:
        run_kernel("layer_norm", x, residual, weight, bias, *sizes, mean, rstd, level=level)
    return out, mean, rstd, total


def ours_backward(grad, x, weight, mean, rstd, level, more=None, centered=True):
    rows, columns = x.shape
    weight_like = torch.empty(columns, dtype=(x if weight is None else weight).dtype)
    found = torch.empty_like(x), weight_like, weight_like.clone()
    sizes = rows, columns, ELEMENTS[x.dtype], ELEMENTS[weight_like.dtype]
    if centered:
        run_kernel("layer_norm_backward", grad, x, weight, mean, rstd, more, *sizes, *found, level=level)
    else:
        run_kernel("rms_norm_backward", grad, x, weight, rstd, more, *sizes, *found[:2], level=level)
    return found


def layer_norm(x, weight, bias):
    return functional.layer_norm(x, x.shape[1:], weight, bias, EPS)


def rms_norm(x, weight, bias=None):
    return functional.rms_norm(x, x.shape[1:], weight, EPS)


def with_gradients(norm, grad, *operands):
    leaves = [one.detach().clone().requires_grad_() for one in operands]
    out = norm(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def doubles(*tensors):
    return [one.double() for one in tensors]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(shape, dtype, level):
    x, grad, weight, bias = operands(*shape, dtype, offset=0.5)
    eager, exact = (
        with_gradients(layer_norm, *given) for given in ((grad, x, weight, bias), doubles(grad, x, weight, bias))
    )
    out, mean, rstd, _ = ours_forward(x, weight, bias, level)
    found = out, *ours_backward(grad, x, weight, mean, rstd, level)
    scale = float((grad.float().abs().amax() * rstd.amax()) if len(x) else 0.0)
    for one, theirs, true in zip(found, eager, exact, strict=True):
        assert_as_exact(one, theirs, true, scale)
    assert torch.allclose(mean, x.float().mean(1), atol=1e-6)
    assert torch.allclose(rstd, (x.double().var(1, correction=0) + EPS).rsqrt().float(), rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape, dtype, level):
    x, grad, weight, _ = operands(*shape, dtype)
    eager, exact = (with_gradients(rms_norm, *given) for given in ((grad, x, weight), doubles(grad, x, weight)))
    out, _, rstd, _ = ours_forward(x, weight, False, level)
    found = out, *ours_backward(grad, x, weight, None, rstd, level, centered=False)[:2]
    scale = float((grad.float().abs().amax() * rstd.amax()) if len(x) else 0.0)
    for one, theirs, true in zip(found, eager, exact, strict=True):
        assert_as_exact(one, theirs, true, scale)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [None, False], ids=["layer", "rms"])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_residual_is_added_and_its_gradient_as_well(weighted, bias, dtype, level):
    x, grad, weight, residual = operands(37, 130, dtype)
    residual, more = torch.randn_like(x), torch.randn_like(x)
    weight = weight if weighted else None
    total = x + residual
    out, mean, rstd, found = ours_forward(x, weight, bias, level, residual)
    assert same_bits(found, total)
    plain = ours_forward(total, weight, bias, level)
    assert same_bits(out, plain[0])

    centered = bias is None
    added = ours_backward(grad, total, weight, mean, rstd, level, more, centered)[0]
    alone = ours_backward(
        grad.float(), total.float(), None if weight is None else weight.float(), mean, rstd, level, None, centered
    )[0]
    exact = (alone.double() + more.double()).to(dtype)
    assert torch.allclose(added, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_may_be_floats_where_the_rest_is_not(level):
    x, grad, weight, bias = operands(20, 70, torch.bfloat16)
    weight, bias = weight.float(), bias.float()
    eager, exact = (
        with_gradients(layer_norm, *given) for given in ((grad, x, weight, bias), doubles(grad, x, weight, bias))
    )
    out, mean, rstd, _ = ours_forward(x, weight, bias, level)
    found = out, *ours_backward(grad, x, weight, mean, rstd, level)
    for one, theirs, true in zip(found, eager, exact, strict=True):
        assert_as_exact(one, theirs, true)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_far_from_zero_keep_their_digits(level):
    x, _, weight, bias = operands(9, 384, torch.float32, offset=1000.0)
    out, *_ = ours_forward(x, weight, bias, level)
    assert_as_exact(out, layer_norm(x, weight, bias), layer_norm(*doubles(x, weight, bias)))


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_with_infinity_or_nan_is_nan_and_others_are_not(level):
    x, _, weight, bias = operands(4, 50, torch.float32)
    x[1, 3], x[2, 49] = torch.inf, torch.nan
    out, *_ = ours_forward(x, weight, bias, level)
    assert_as_exact(out, layer_norm(x, weight, bias), layer_norm(*doubles(x, weight, bias)))


@pytest.mark.parametrize("level", LEVELS)
def test_results_do_not_depend_on_the_threads(level):
    x, grad, weight, bias = operands(700, 384, torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out, mean, rstd, _ = ours_forward(x, weight, bias, level)
            found.append((out, *ours_backward(grad, x, weight, mean, rstd, level)))
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
