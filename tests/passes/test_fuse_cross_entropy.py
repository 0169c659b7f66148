"""The gradient of a cross-entropy takes one tensor of the scores' size, and is eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import ort_accel
from ort_accel.passes.fuse_cross_entropy import CROSS_ENTROPY_BACKWARD

aten = torch.ops.aten


class Classifier(nn.Module):
    def __init__(self, reduction: str, weight: torch.Tensor | None) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 7)
        self.reduction = reduction
        self.register_buffer("weight", weight)

    def forward(self, x, labels):
        losses = functional.cross_entropy(self.scores(x), labels, self.weight, reduction=self.reduction)
        return losses.sum() * 1.5


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weight", [None, torch.arange(7.0)])
@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("fusions", ["auto", False])
def test_gradients_equal_eagers(reduction, weight, valid, fusions):
    torch.manual_seed(0)
    eager = Classifier(reduction, weight)
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"compute": {"fusions": fusions}})
    x, labels = torch.randn(9, 6), torch.tensor([1, 2, 3, -100, 4, 5, 6, -100, 0])
    if not valid:
        labels.fill_(-100)
    eager(x, labels).backward()
    ours(x, labels).backward()
    torch.testing.assert_close(ours.scores.weight.grad, eager.scores.weight.grad, equal_nan=True)
    assert ort_accel.report(ours).counters["fused cross-entropy gradient"] == (fusions == "auto")


def test_logits_with_another_reader_are_not_fused():
    class Both(nn.Module):
        def forward(self, x, labels):
            logarithms = functional.log_softmax(x, 1)
            return functional.nll_loss(logarithms, labels) + logarithms.square().mean()

    x, labels = torch.randn(5, 7, requires_grad=True), torch.tensor([0, 1, 2, -100, 6])
    expected = torch.autograd.grad(Both()(x, labels), x)[0]
    ours = ort_accel.accelerate(Both())
    torch.testing.assert_close(torch.autograd.grad(ours(x, labels), x)[0], expected)
    assert not ort_accel.report(ours).counters["fused cross-entropy gradient"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("weight", [None, torch.arange(7.0)], ids=["", "weighted"])
@pytest.mark.parametrize("labels", ["some", "none", "all", "bytes"])
def test_the_fused_operator_equals_the_two_steps_in_pytorch(dtype, reduction, weight, labels):
    torch.manual_seed(0)
    ignored = 255 if labels == "bytes" else -100
    target = {
        "some": torch.tensor([1, -100, 6, 0, -100]),
        "none": torch.full((5,), -100),
        "all": torch.tensor([1, 2, 6, 0, 6]),
        "bytes": torch.tensor([1, 255, 6, 0, 255], dtype=torch.uint8),
    }[labels]
    scores = torch.randn(5, 7, dtype=dtype)
    scores[1] = torch.nan
    logarithms = aten._log_softmax(scores, 1, False)
    rest = (target, None if weight is None else weight.to(dtype), reduction, ignored)
    loss, total = aten.nll_loss_forward(logarithms, *rest)
    grad = torch.randn_like(loss)
    slope = aten.nll_loss_backward(grad, logarithms, *rest, total)
    expected = aten._log_softmax_backward_data(slope, logarithms, 1, dtype)
    torch.testing.assert_close(CROSS_ENTROPY_BACKWARD(grad, logarithms, *rest, total), expected, equal_nan=True)
