"""What each token's target gets of the scores, and the entropy, against single operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ort_accel.kernels import token_log_probs as module
from ort_accel.kernels.token_log_probs import token_scores


def plain(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logarithms = scores.log_softmax(-1)
    found = logarithms.gather(-1, targets[:, None]).squeeze(-1)
    return found, -(logarithms.exp() * logarithms).sum(-1), scores.logsumexp(-1)


@pytest.mark.parametrize("weights", [(1, 1), (1, 0), (0, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_and_gradients(
    weights: tuple[int, int], rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_NUMBERS", 300)  # several blocks, the last one smaller
    torch.manual_seed(rows)
    scores, targets = torch.randn(rows, 90, dtype=dtype) * 8, torch.randint(0, 90, (rows,))
    asked = [torch.randn(rows, dtype=dtype) * weight for weight in weights]
    outcomes = []
    for function in (token_scores, plain):
        given = scores.clone().requires_grad_()
        results = function(given, targets)
        sum((one * ask).sum() for one, ask in zip(results, asked, strict=False)).backward()
        assert given.grad is not None
        outcomes.append([*results, given.grad])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_rows() -> None:
    scores = torch.randn(0, 9, requires_grad=True)
    found, entropy, total = token_scores(scores, torch.zeros(0, dtype=torch.int64))
    assert found.shape == entropy.shape == total.shape == (0,)
    found.sum().backward()
    assert scores.grad is not None
    assert scores.grad.shape == (0, 9)


def test_the_sum_of_powers_has_no_gradient() -> None:
    found, entropy, total = token_scores(torch.randn(3, 9, requires_grad=True), torch.zeros(3, dtype=torch.int64))
    assert found.requires_grad
    assert entropy.requires_grad
    assert not total.requires_grad


def test_it_is_an_operator_as_torch_wants_it() -> None:
    given = torch.randn(5, 9, requires_grad=True), torch.randint(0, 9, (5,))
    torch.library.opcheck(token_scores, given)
