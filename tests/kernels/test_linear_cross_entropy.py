"""A linear layer with its cross-entropy against PyTorch's two operators: losses, gradients, errors and memory."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from ort_accel.kernels import linear_cross_entropy as operator
from ort_accel.kernels.linear_cross_entropy import MEAN, SUM, ScoreOptions, linear_cross_entropy
from ort_accel.native.library import native_library

IGNORED = -100
OPTIONS = {
    "plain": ScoreOptions(),
    "smoothed": ScoreOptions(smoothing=0.1),
    "scaled": ScoreOptions(scale=0.3),
    "capped": ScoreOptions(soft_cap=3.0, scale=0.7),
    "with z-loss": ScoreOptions(z_loss=0.01),
    "all": ScoreOptions(0.1, 0.01, 5.0, 0.5),
}
SHAPES = [(1, 4, 9), (37, 24, 301), (40, 16, 5000)]
"""Rows, width and columns; 5,000 columns are more than the native kernel rounds at a time."""


def run_with(native: bool, bytes_at_once: int = 30_000):
    """Has the operator compute few rows at a time, natively or by PyTorch."""
    library = native_library() if native else None
    return patch.multiple(operator, native_library=lambda: library, BYTES_AT_ONCE=bytes_at_once)


def operands(shape: tuple[int, int, int], has_bias: bool, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    rows, width, columns = shape
    torch.manual_seed(columns)
    made = [torch.randn(rows, width), torch.randn(columns, width), torch.randn(columns)]
    leaves: list[Tensor | None] = [one.to(dtype).requires_grad_() for one in made]
    return leaves if has_bias else [*leaves[:2], None]


def labels(rows: int, columns: int) -> Tensor:
    target = torch.randint(columns, (rows,))
    target[1::3] = IGNORED
    return target


def expected(given: list[Tensor | None], target: Tensor, reduction: int, options: ScoreOptions) -> Tensor:
    scores = functional.linear(*given) * options.scale
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    losses = functional.cross_entropy(
        scores.float() if scores.dtype == torch.bfloat16 else scores,
        target, ignore_index=IGNORED, label_smoothing=options.smoothing, reduction="none",
    )  # fmt: skip
    valid = target != IGNORED
    total = (losses + options.z_loss * scores.logsumexp(-1).square() * valid).sum()
    return total / valid.sum() if reduction == MEAN else total


def gradients(loss: Tensor, given: list[Tensor | None]) -> list[Tensor]:
    return list(torch.autograd.grad(0.5 * loss, [one for one in given if one is not None]))


def in_double(given: list[Tensor | None]) -> list[Tensor | None]:
    return [None if one is None else one.detach().double().requires_grad_() for one in given]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_two_operators(name, reduction, has_bias, shape, native):
    given, target, options = operands(shape, has_bias), labels(shape[0], shape[2]), OPTIONS[name]
    with run_with(native):
        loss = linear_cross_entropy(*given, target, reduction, IGNORED, options)
        found = gradients(loss, given)
    exact = in_double(given)
    reference = expected(exact, target, reduction, options)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=1e-6)
    for one, other in zip(found, gradients(reference, exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_in_bfloat16_it_errs_as_eager_mode_does(name, shape, native):
    given, target, options = operands(shape, True, torch.bfloat16), labels(shape[0], shape[2]), OPTIONS[name]
    with run_with(native):
        loss = linear_cross_entropy(*given, target, SUM, IGNORED, options)
        found = gradients(loss, given)
    exact = in_double(given)
    reference, eager = (expected(leaves, target, SUM, options) for leaves in (exact, given))
    assert loss.dtype == torch.float32
    assert abs(loss - reference) <= 4 * max(abs(eager - reference), 1e-3 * abs(reference))
    for one, theirs, true in zip(found, gradients(eager, given), gradients(reference, exact), strict=True):
        mine, others = ((item.double() - true).norm() for item in (one, theirs))
        assert one.dtype == torch.bfloat16
        assert mine <= 2 * others


@pytest.mark.parametrize("native", [True, False])
def test_rows_without_labels(native):
    given, none = operands((6, 4, 50), False), torch.full((6,), IGNORED)
    with run_with(native):
        mean, total = (linear_cross_entropy(*given, none, how, IGNORED, ScoreOptions()) for how in (MEAN, SUM))
        found = *gradients(total, given), *gradients(mean, given)
        empty = linear_cross_entropy(given[0][:0], *given[1:], none[:0], SUM, IGNORED, ScoreOptions())
        of_empty = torch.autograd.grad(empty, given[1])[0]
    assert mean.isnan()
    assert total == empty == 0
    assert not any(one.any() for one in (*found, of_empty))


@pytest.mark.parametrize("native", [True, False])
def test_a_label_that_is_no_column_is_eagers_error(native):
    given = operands((6, 4, 50), False)
    with run_with(native), pytest.raises(IndexError, match="Target 50 is out of bounds"):
        linear_cross_entropy(*given, torch.tensor([1, 2, 50, 3, 4, 5]), MEAN, IGNORED, ScoreOptions())


def wanted_in_graph(frozen: str) -> list[bool]:
    """The gradients that the forward computes where one operand is frozen."""
    given = dict(zip(("hidden", "weight", "bias"), operands((6, 4, 50), True), strict=True))
    if frozen == "all":
        with torch.no_grad():
            return _wanted(list(given.values()))
    given[frozen].requires_grad_(False)
    return _wanted(list(given.values()))


def _wanted(given: list[Tensor]) -> list[bool]:
    def run(*leaves: Tensor) -> Tensor:
        return linear_cross_entropy(*leaves, torch.zeros(6, dtype=torch.int64), MEAN, IGNORED, ScoreOptions())

    graph = make_fx(run, pre_dispatch=True)(*given).graph
    (node,) = [node for node in graph.nodes if node.target is operator.own.linear_cross_entropy.default]
    return list(node.args[-1])


def test_gradients_that_nobody_wants_are_not_computed():
    assert wanted_in_graph("weight") == [True, False, True]
    assert wanted_in_graph("hidden") == [False, True, True]
    assert wanted_in_graph("all") == [False, False, False]


def test_autocast_decides_the_type_of_the_products():
    given, target = operands((9, 8, 300), True), labels(9, 300)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*given, target, SUM, IGNORED, ScoreOptions())
        eager = expected(given, target, SUM, ScoreOptions())
    assert loss != linear_cross_entropy(*given, target, SUM, IGNORED, ScoreOptions())
    torch.testing.assert_close(loss, eager, rtol=1e-3, atol=1e-3)
    for one, other in zip(gradients(loss, given), gradients(eager, given), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_memory_does_not_grow_with_the_rows(dtype):
    width, columns = 512, 152_000
    found = [operator.workspace(rows, width, columns, dtype, True) for rows in (1, 1024, 4096, 1 << 20)]
    assert found[0] < found[1] == found[2] == found[3]
    of_weight = 0 if dtype == torch.float32 else 4 * columns * width
    assert found[1] <= operator.BYTES_AT_ONCE + of_weight


def test_without_the_library_no_tensor_has_all_scores():
    rows, columns = 64, 3000
    given, target = operands((rows, 8, columns), False), labels(rows, columns)
    at_once = 4 * columns * 8

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            results = function(*args, **(kwargs or {}))
            for one in results if isinstance(results, tuple | list) else [results]:
                if isinstance(one, Tensor) and function.namespace == "aten":
                    self.numbers = max(self.numbers, one.numel())
            return results

    with run_with(native=False, bytes_at_once=at_once), torch.no_grad(), Largest() as largest:
        operator._linear_cross_entropy(*given, target, MEAN, IGNORED, ScoreOptions(), [True, True, False])
    assert largest.numbers <= max(8 * columns, 8 * columns)


def test_the_operator_is_registered_as_torch_wants_it():
    given, target = operands((6, 4, 50), True), labels(6, 50)
    arguments = (*given, target, MEAN, IGNORED, list(ScoreOptions()), [True, True, True])
    torch.library.opcheck(
        operator.own.linear_cross_entropy.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
