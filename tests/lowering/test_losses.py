"""Losses and their gradients equal eager's: all reductions, weights, ignored labels, labels that are no class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.lowering.through_ort import Lowered, assert_like_eager

REDUCTIONS = ["none", "mean", "sum"]
SCORES = torch.arange(9 * 7, dtype=torch.float32).view(9, 7).sin() * 3
OTHERS = torch.arange(9 * 7, dtype=torch.float32).view(9, 7).cos()
LABELS = torch.tensor([0, 6, 6, -100, 2, 2, 2, -100, 1])
NO_LABELS = torch.full((9,), -100)
WEIGHT = torch.tensor([1.0, 2.0, 0.0, 0.5, 1.0, 3.0, 0.25])


def with_gradient(loss: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The loss, and its gradient with respect to the first argument."""

    def function(first: torch.Tensor, *rest: torch.Tensor) -> Any:
        value, backward = torch.func.vjp(lambda x: loss(x, *rest), first)
        return value, *backward(torch.ones_like(value) * 1.5)

    return torch.func.functionalize(function)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("labels", [LABELS, NO_LABELS], ids=["labels", "no labels"])
def test_cross_entropy(reduction, labels):
    def plain(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores, target, reduction=reduction)

    def weighted(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores, target, weight, reduction=reduction)

    assert_like_eager(with_gradient(plain), SCORES, labels)
    assert_like_eager(with_gradient(weighted), SCORES, labels, WEIGHT)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("label", [3, 2, -100])
def test_the_total_weight_and_single_rows(reduction, label):
    def function(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor) -> Any:
        nll = torch.ops.aten.nll_loss_forward
        return (
            *nll(scores[0], target, weight, reduction, -100),
            *nll(scores[0], target, None, reduction, -100),
            *nll(scores, rows, weight, reduction, -100),
            *nll(scores, rows, None, reduction, -100),
        )

    assert_like_eager(function, SCORES, torch.tensor(label), WEIGHT, LABELS)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_the_gradient_of_a_single_row(reduction):
    def function(scores: torch.Tensor, target: torch.Tensor, total: torch.Tensor) -> Any:
        backward = torch.ops.aten.nll_loss_backward
        return backward(total, scores, target, None, reduction, -100, total)

    for label in (4, -100):
        assert_like_eager(function, SCORES[0], torch.tensor(label), torch.tensor(1.0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_of_pictures(reduction):
    pictures = SCORES.view(1, 7, 3, 3).repeat(2, 1, 1, 1)
    target = LABELS.view(1, 3, 3).repeat(2, 1, 1)

    def loss(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores, target, weight, reduction=reduction)

    assert_like_eager(with_gradient(loss), pictures, target, WEIGHT)


def test_another_label_to_ignore_and_smoothing():
    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        smooth = functional.cross_entropy(scores, target, ignore_index=2, label_smoothing=0.1)
        return smooth + functional.cross_entropy(scores, target, ignore_index=6)

    assert_like_eager(with_gradient(loss), SCORES, LABELS.clamp(min=0))


@pytest.mark.parametrize("bad", [7, -1, -7, 10**6])
def test_a_label_that_is_no_class_is_an_error(bad):
    loss = with_gradient(functional.cross_entropy)
    target = LABELS.clone()
    target[4] = bad
    lowered = Lowered(loss, [SCORES, LABELS])
    assert not lowered.refusals
    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
        loss(SCORES, target)
    with pytest.raises(Exception, match=r"(?i)out of|bounds"):
        lowered(SCORES, target)


def test_infinities_and_nan_count_only_where_a_label_points():
    scores = SCORES.clone()
    scores[3], scores[0, 5], scores[1, 6] = torch.nan, torch.nan, -torch.inf
    for reduction in REDUCTIONS:
        for weight in (WEIGHT, WEIGHT * 0):
            assert_like_eager(
                lambda x, t, w, r=reduction: functional.nll_loss(x, t, w, reduction=r), scores, LABELS, weight
            )


DIFFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "mse": functional.mse_loss,
    "smooth l1": functional.smooth_l1_loss,
    "smooth l1 with beta": lambda x, y, reduction: functional.smooth_l1_loss(x, y, reduction=reduction, beta=0.3),
    "smooth l1 without beta": lambda x, y, reduction: functional.smooth_l1_loss(x, y, reduction=reduction, beta=0.0),
    "huber": functional.huber_loss,
    "huber with delta": lambda x, y, reduction: functional.huber_loss(x, y, reduction=reduction, delta=0.4),
    "soft margin": functional.soft_margin_loss,
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_losses_of_pairs(name, reduction):
    loss = DIFFERENCES[name]
    for scale in (1.0, 100.0):
        assert_like_eager(with_gradient(lambda x, y: loss(x, y, reduction=reduction)), SCORES * scale, OTHERS)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_with_logits(reduction):
    def losses(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Any:
        loss = functional.binary_cross_entropy_with_logits
        weighted = loss(x, y, weight, reduction=reduction, pos_weight=weight * 2)
        return weighted, loss(x * 100, y, reduction=reduction), loss(x, y, pos_weight=weight, reduction=reduction)

    assert_like_eager(losses, SCORES, OTHERS.sigmoid(), WEIGHT)


def test_probabilities_are_checked_by_pytorch():
    loss = with_gradient(functional.binary_cross_entropy)
    probabilities = torch.cat([SCORES.sigmoid(), torch.tensor([[0.0, 1, 0, 1, 0, 1, 0]])])
    targets = torch.cat([OTHERS.sigmoid(), torch.tensor([[0.0, 1, 1, 0, 0.5, 0.5, 1]])])
    lowered = Lowered(loss, [probabilities, targets])
    assert set(lowered.refusals) == {"aten.binary_cross_entropy.default"}
    torch.testing.assert_close(lowered(probabilities, targets), list(loss(probabilities, targets)))
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        lowered(probabilities + 1, targets)


def test_sizes_that_change():
    def losses(x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x, t) + functional.mse_loss(x, y) + functional.huber_loss(x, y, reduction="sum")

    function = with_gradient(losses)
    lowered = Lowered(function, [SCORES, OTHERS, LABELS], dynamic=True)
    assert not lowered.refusals
    for count in (9, 4):
        inputs = SCORES[:count].contiguous(), OTHERS[:count].contiguous(), LABELS[:count].contiguous()
        torch.testing.assert_close(lowered(*inputs), list(function(*inputs)))
