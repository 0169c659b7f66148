"""A linear layer with the log-probability of each row's target against PyTorch's operators."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ort_accel.kernels import linear_cross_entropy
from ort_accel.kernels import linear_token_scores as operator
from ort_accel.kernels.linear_token_scores import ScoreForm, linear_token_scores

ROWS, WIDTH, COLUMNS = 13, 6, 50
FORMS = {"plain": ScoreForm(), "all": ScoreForm(0.6, 3.0, 0.7)}

few_rows_at_once = patch.object(linear_cross_entropy, "BYTES_AT_ONCE", 4 * 4 * COLUMNS)


def operands(frozen: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    leaves = [torch.randn(*sizes).to(dtype) for sizes in ((ROWS, WIDTH), (COLUMNS, WIDTH), (COLUMNS,))]
    for one in leaves[: 1 if frozen else 3]:
        one.requires_grad_()
    return leaves, torch.randint(COLUMNS, (ROWS,))


def expected(given: list[Tensor], targets: Tensor, form: ScoreForm) -> tuple[Tensor, ...]:
    scores = functional.linear(*given) * form.scale
    if form.soft_cap:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    logs = (scores / form.temperature).log_softmax(-1)
    found, entropy = logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    mean, top = (scores / form.temperature).mean(-1), logs.argmax(-1) == targets
    return found, entropy, (2 * logs).logsumexp(-1), mean.detach(), top


def gradients(found: Tensor, entropy: Tensor, given: list[Tensor], with_entropy: bool) -> list[Tensor]:
    loss = (found * torch.linspace(-1, 1, ROWS)).sum() + (entropy.square().sum() if with_entropy else 0)
    return list(torch.autograd.grad(loss, [one for one in given if one.requires_grad]))


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_numbers_and_gradients(name, frozen, with_entropy):
    given, targets = operands(frozen, torch.float32)
    with few_rows_at_once:
        found, entropy, _, *statistics, slopes = linear_token_scores(*given, targets, FORMS[name], (True, True, True))
        grads = gradients(found, entropy, given, with_entropy)
    exact, _ = operands(frozen)
    true = expected(exact, targets, FORMS[name])
    for one, other in zip((found, entropy, *statistics), true, strict=True):
        torch.testing.assert_close(one.to(other.dtype), other, rtol=1e-5, atol=1e-5)
        assert one.requires_grad == (one is found or one is entropy)
    for one, other in zip(grads, gradients(*true[:2], exact, with_entropy), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert slopes.numel() == (ROWS * WIDTH if frozen else 0)


def test_a_frozen_head_computes_no_scores_in_the_backward():
    given, targets = operands(True, torch.float32)
    found, *_ = linear_token_scores(*given, targets, ScoreForm())
    with patch.object(operator, "_scores", side_effect=AssertionError("scores again")):
        torch.autograd.grad(found.sum(), given[0])


def test_wanted_results_alone():
    given, targets = operands(False, torch.float32)
    _, _, total, *statistics, slopes = linear_token_scores(*given, targets, ScoreForm())
    assert total.shape == (ROWS,)
    assert not any(one.numel() for one in (*statistics, slopes))
    (grad,) = torch.autograd.grad(linear_token_scores(*given, targets, ScoreForm())[0].sum(), given[2])
    assert grad.shape == (COLUMNS,)


def test_no_rows():
    given, targets = operands(False, torch.float32)
    found, *_ = linear_token_scores(given[0][:0], *given[1:], targets[:0], ScoreForm())
    (grad,) = torch.autograd.grad(found.sum(), given[1])
    assert found.shape == (0,)
    assert not grad.any()


@pytest.mark.parametrize("frozen", [True, False])
def test_in_bfloat16_it_errs_as_eager_mode_does(frozen):
    given, targets = operands(frozen, torch.bfloat16)
    with few_rows_at_once:
        found, entropy, *_ = linear_token_scores(*given, targets, ScoreForm())
        grads = gradients(found, entropy, given, False)
    exact, _ = operands(frozen)
    eager = functional.linear(*given).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    theirs, true = (
        gradients(eager, eager, given, False),
        gradients(*expected(exact, targets, ScoreForm())[:2], exact, False),
    )
    for one, other, real in zip(grads, theirs, true, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - real).norm() <= 2 * (other.double() - real).norm()


def test_the_operators_are_registered_as_torch_wants_it():
    given, targets = operands(False, torch.float32)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (*given, targets, list(ScoreForm()), [True, False, True], False)
    torch.library.opcheck(operator.own.linear_token_scores.default, arguments, test_utils=checks)


def test_its_memory_does_not_grow_with_the_rows():
    found = [operator.workspace(rows, 512, 152_000, torch.float32, True) for rows in (1, 1024, 4096, 1 << 20)]
    assert found[0] < found[1] == found[2] == found[3] <= 2 * linear_cross_entropy.BYTES_AT_ONCE
