"""NaN at padded positions goes unseen while padding is skipped, and is seen as in eager mode where it is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ort_accel
from tests.against_eager import assert_step_as_eager, report, step
from tests.capture.language_model import WIDTH, Model, Output, batch, engine
from tests.tiers import mostly_long

PLACES = ["inputs", "weights", "mask"]
CASES = [(place, value) for place in PLACES for value in (float("nan"), float("inf"))]


class Embedded(Model):
    """Takes embeddings of tokens, and adds those of token types."""

    def body(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(ids + self.embed(mask))
        x = x + self.attend(x, mask)
        return x + self.narrow(torch.nn.functional.gelu(self.wide(x)))


class Additive(Model):
    """Takes a mask that is added to the scores of attention; padding gets what the batch says."""

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask == 0, float("-inf"))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, None, :])
        return self.out(found.transpose(1, 2).flatten(2))


def case(place: str, value: float) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model, and a batch with this value at its padded positions."""
    given: dict[str, Any] = batch(4, 10)
    model = Embedded() if place == "inputs" else Additive() if place == "mask" else Model()
    if place == "inputs":
        embeddings = torch.randn(4, 10, WIDTH)
        given["ids"] = embeddings.masked_fill(given["mask"][..., None] == 0, value)
    else:
        with torch.no_grad():
            model.embed.weight[0] = value
    return model, given


@pytest.mark.parametrize(("place", "value"), mostly_long(CASES, CASES[2]))
def test_without_skipping_it_is_seen_as_in_eager_mode(place: str, value: float) -> None:
    model, given = case(place, value)
    ours = ort_accel.accelerate(copy.deepcopy(model), engine(density={"padding": False}))
    traces = [step(each, **given) for each in (ours, model)]
    assert all(trace.loss.isnan() for trace in traces)
    for name, gradient in traces[1].gradients.items():
        assert torch.equal(traces[0].gradients[name].isnan(), gradient.isnan()), name


@pytest.mark.parametrize(("place", "value"), mostly_long(CASES, CASES[0]))
def test_with_skipping_it_goes_unseen_and_the_report_says_so(place: str, value: float) -> None:
    model, given = case(place, value)
    finite, same = case(place, 0.0)
    ours = ort_accel.accelerate(copy.deepcopy(model), engine())
    assert step(model, **given).loss.isnan()
    trace, wanted = step(ours, **given), step(finite, **same)
    torch.testing.assert_close(trace.loss, wanted.loss, rtol=1e-4, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in trace.gradients.values() if gradient is not None)
    assert "NaN or infinity in padding goes unseen" in report(ours).features["density.padding"].effect


@pytest.mark.long
def test_nan_of_a_real_token_is_seen_with_every_setting() -> None:
    model, given = case("inputs", 0.0)
    given["ids"][0, 0, 0] = float("nan")
    ours = ort_accel.accelerate(copy.deepcopy(model), engine())
    assert step(ours, **given).loss.isnan()
    assert step(model, **given).loss.isnan()


def test_a_row_that_is_padded_as_a_whole_is_as_in_eager_mode() -> None:
    eager = Model()
    ours = ort_accel.accelerate(copy.deepcopy(eager), engine())
    assert_step_as_eager(eager, ours, **batch(4, 10))
    given = batch(4, 10)
    given["mask"][1] = 0
    mine, wanted = step(ours, **given), step(eager, **given)
    assert torch.equal(mine.loss.isnan(), wanted.loss.isnan())
    torch.testing.assert_close(mine.loss, wanted.loss, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert isinstance(ours(**given), Output)
