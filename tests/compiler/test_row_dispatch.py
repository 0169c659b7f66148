"""Rows that do not count are left out where that gains something; what a script sees stays what eager mode shows."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ort_accel
from ort_accel.compiler.row_dispatch import PER_TOKEN
from ort_accel.errors import OrtAccelError
from ort_accel.reporting.report import State
from tests.against_eager import assert_same, assert_step_as_eager, compilations, pair, report, step
from tests.capture.language_model import VOCABULARY, WIDTH, Model, Nested, Output, batch, engine, hidden


class Pooled(Model):
    """A classifier on the mean of all tokens, padded ones too."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Output:
        scores = self.head(self.body(ids, mask).mean(1))
        return Output(F.cross_entropy(scores, labels[:, 0].clamp(min=0)), scores)


class FirstToken(Model):
    """A classifier on the first token, which reads padding where a row is padded as a whole."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Output:
        scores = self.head(self.body(ids, mask)[:, 0])
        return Output(F.cross_entropy(scores, labels[:, 0].clamp(min=0)), scores)


class Checkpointed(Model):
    """Computes its body and its head again in the backward."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        self._how = how

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Output:
        hidden = checkpoint(self.body, ids, mask, use_reentrant=False, **self._how)
        logits = checkpoint(self.head, hidden, use_reentrant=False, **self._how)
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class NestedFirstToken(Nested, FirstToken):
    """Reads padding behind parts that are computed again."""


def kept_products() -> tuple[object, object]:
    """What `context_fn` of a checkpoint may give: results that are saved all the same."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def states(model: nn.Module) -> dict[str, State]:
    names = ("density.labels", "density.padding", "compute.upstream", "compute.loss_only")
    return {name: report(model).features[name].state for name in names}


def work(model: nn.Module) -> float:
    """Floating point operations of the one forward graph, at the sizes that it was compiled with."""
    return sum(segment.flops for segment in report(model).segments if segment.graph.startswith("forward"))


def test_changing_densities_compile_nothing_after_the_warm_up() -> None:
    eager, ours = pair(Model(), {"observe": {"log_level": "error"}})

    def run(number: int, real: float) -> None:
        given = batch(3 + number % 3, 8 + number % 4, real, labelled=real, seed=number)
        assert_step_as_eager(eager, ours, **given, seed=number)

    for number in range(80):  # sparse, then dense for so long that all rows are run, then sparse again
        run(number, 1.0 if 8 <= number < 45 else 0.2)
    warm, ways = compilations(ours), [report(ours).counters[f"batches run on {rows} rows"] for rows in ("some", "all")]
    for number in range(120):
        run(number, 1.0 if 5 <= number < 45 else 0.2 + 0.2 * (number % 5))
    assert compilations(ours) == warm, "both ways are compiled once, each for its first size and then for all"
    after = [report(ours).counters[f"batches run on {rows} rows"] for rows in ("some", "all")]
    assert all(new > old > 0 for new, old in zip(after, ways, strict=True)), "it went from one to the other and back"


def test_the_report_says_how_many_rows_counted() -> None:
    eager, ours = pair(Model(), engine())
    for seed in range(4):
        assert_step_as_eager(eager, ours, **batch(4, 10, seed=seed), seed=seed)
    found = report(ours)
    assert found.counters["batches run on some rows"] == 4
    assert states(ours)["density.labels"] is states(ours)["density.padding"] is State.APPLIED
    assert "% of the rows count, over 4 batches" in found.features["density.labels"].effect
    assert found.features["compute.loss_only"].state is State.APPLIED


def test_a_feature_that_leaves_no_row_out_is_reported_as_off() -> None:
    eager, ours = pair(Model(), engine())
    for seed in range(2):
        assert_step_as_eager(eager, ours, **batch(4, 10, real=1.0, labelled=1.0, seed=seed), seed=seed)
    found = report(ours)
    assert found.counters["batches run on some rows"] == 0
    assert states(ours)["density.labels"] is states(ours)["density.padding"] is State.OFF
    assert re.match(r"100% of the rows count, over \d batch(es)?, too many", found.features["density.padding"].reason)


@pytest.mark.parametrize(
    ("wishes", "labels", "padding"),
    [
        ({}, True, True),
        ({"density": {"padding": False}}, True, False),
        ({"density": {"labels": False, "padding": False}, "compute": {"upstream": False}}, False, False),
    ],
    ids=["all", "labels alone", "nothing"],
)
def test_each_feature_can_be_switched_off(wishes: dict[str, Any], labels: bool, padding: bool) -> None:
    eager, ours = pair(Model(), engine(**wishes))
    given = batch(4, 10, real=0.5, labelled=0.3)
    assert_step_as_eager(eager, ours, **given)
    tokens, real, counts = 40, int(given["mask"].sum()), int((given["labels"] != -100).sum())
    rows = {"body": real if padding else tokens, "head": counts if labels else tokens}
    per_row = {"keys": 2 * 2 * WIDTH * WIDTH, "head": 2 * WIDTH * VOCABULARY}
    assert states(ours)["density.padding"] is (State.APPLIED if padding else State.OFF)
    assert states(ours)["density.labels"] is (State.APPLIED if labels else State.OFF)
    least = rows["body"] * per_row["keys"] + rows["head"] * per_row["head"]
    assert least <= work(ours) <= least + rows["head"] * 30 * WIDTH * WIDTH + 4 * 10 * 10 * 4 * WIDTH


def test_the_report_names_the_reader_of_padding() -> None:
    eager, ours = pair(Pooled(), engine())
    for seed in range(2):
        assert_step_as_eager(eager, ours, **batch(4, 10, seed=seed), seed=seed)
    feature = report(ours).features["density.padding"]
    assert feature.state is State.REFUSED
    assert "aten.mean" in feature.reason
    assert "self.body(ids, mask).mean(1)" in feature.reason


def test_padding_that_is_read_is_an_error_if_it_must_be_skipped() -> None:
    ours = ort_accel.accelerate(Pooled(), engine(density={"padding": True}))
    with pytest.raises(OrtAccelError, match=r"density.padding is true.*mean.*set it to auto"):
        ours(**batch(4, 10))


def test_padding_that_must_be_skipped_is_an_error_if_only_labels_can_be() -> None:
    class Convolved(Model):
        def body(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().body(ids, mask).cumsum(1)

    ours = ort_accel.accelerate(Convolved(), engine(density={"padding": True}))
    with pytest.raises(OrtAccelError, match=r"density.padding is true.*cumsum"):
        ours(**batch(4, 10))


def test_missing_labels_are_an_error_if_they_must_be_skipped() -> None:
    class Regression(Model):
        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Output:
            scores = self.head(self.body(ids, mask))
            return Output(scores.square().mean(), scores)

    ours = ort_accel.accelerate(Regression(), engine(density={"labels": True}))
    with pytest.raises(OrtAccelError, match=r"density.labels is true"):
        ours(**batch(4, 10))


@pytest.mark.long
def test_evaluation_needs_no_labels_if_training_must_skip_some() -> None:
    eager, ours = pair(Model(), engine(density={"labels": True}))
    for model in (eager, ours):
        model.eval()
    given = batch(4, 10)
    with torch.no_grad():
        for wanted, got in zip(eager(**given), ours(**given), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        unlabelled = {name: given[name] for name in ("ids", "mask")}
        torch.testing.assert_close(ours(**unlabelled).logits, eager(**unlabelled).logits, rtol=1e-4, atol=1e-5)
    for model in (eager, ours):
        model.train()
    assert_step_as_eager(eager, ours, **given)
    trained = states(ours)
    assert trained["density.labels"] is State.APPLIED
    with torch.no_grad():
        ours(**batch(5, 12))
    assert states(ours) == trained, "an evaluation that reads every row does not speak for the training"


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_batch_whose_padding_is_read_runs_whole(first: bool) -> None:
    eager, ours = pair(FirstToken(), engine(density={"padding": True}))
    read = batch(4, 10)
    read["mask"][2] = 0
    order = [read, batch(4, 10, seed=1)] if first else [batch(4, 10, seed=1), read]
    for given in order:
        assert_step_as_eager(eager, ours, **given)
    counters = report(ours).counters
    assert (counters["batches run on some rows"], counters["batches run on all rows"]) == (1, 1)
    assert compilations(ours) == 2


def test_labels_of_another_shape_raise_the_error_of_eager_mode() -> None:
    eager, ours = pair(Model(), engine())
    assert_step_as_eager(eager, ours, **batch(4, 10))
    wrong = batch(4, 10) | {"labels": torch.zeros(4, 9, dtype=torch.long)}
    with pytest.raises(ValueError, match="Expected input batch_size"):
        eager(**wrong)
    with pytest.raises(Exception, match="Expected input batch_size"):
        ours(**wrong)


def test_training_allocates_no_tensor_of_the_size_of_all_logits() -> None:
    model = Model()
    model.head = nn.Linear(WIDTH, 4000)
    eager, ours = pair(model, engine())
    given = batch(4, 32, real=0.5, labelled=0.2)
    assert_step_as_eager(eager, ours, **given)
    all_scores = 4 * 32 * 4000 * 4
    assert largest_allocation(eager, given) >= all_scores
    assert largest_allocation(ours, given) < all_scores / 2


def largest_allocation(model: nn.Module, given: dict[str, Tensor]) -> int:
    """The most that one operator takes in a step, in bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(model, **given)
    return max(event.self_cpu_memory_usage for event in profiler.events())


class TestReadingTheLogits:
    """In training they are computed only when they are read, and then in every later step."""

    def test_gives_what_eager_gives_with_gradients(self) -> None:
        eager, ours = pair(Model(), engine())

        def loss(output: Output) -> Tensor:
            assert output.loss is not None
            return output.loss + output.logits.softmax(-1)[..., 3].sum()

        for seed in range(3):
            assert_same(*(step(m, **batch(4, 10, seed=seed), seed=seed, loss=loss) for m in (ours, eager)))
        feature = report(ours).features["compute.loss_only"]
        assert (feature.state, feature.reason) == (State.REFUSED, f"the script reads {PER_TOKEN} in training")

    def test_later_gives_the_step_that_they_belong_to(self) -> None:
        eager, ours = pair(Model(), engine())
        kept = []
        for model in (eager, ours):
            torch.manual_seed(5)
            output = model(**batch(4, 10))
            torch.rand(7)
            kept.append((output.logits.detach() * 1, torch.rand(3)))
        torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-5)

    def test_after_the_weights_have_changed_gives_those_of_the_call(self) -> None:
        kept = []
        for model in pair(Model(), engine()):
            torch.manual_seed(5)
            output = model(**batch(4, 10))
            output.loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            kept.append(output.logits.detach() * 1)
        torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-5)

    def test_is_an_error_where_only_the_loss_is_wanted(self) -> None:
        ours = ort_accel.accelerate(Model(), engine(compute={"loss_only": True}))
        output = ours(**batch(4, 10))
        assert output.logits.shape == (4, 10, VOCABULARY)
        with pytest.raises(OrtAccelError, match=r"compute.loss_only is true"):
            output.logits.sum()

    def test_costs_nothing_where_they_are_always_made(self) -> None:
        eager, ours = pair(Model(), engine(compute={"loss_only": False}))
        assert_step_as_eager(eager, ours, **batch(4, 10))
        assert type(ours(**batch(4, 10)).logits) is Tensor
        assert report(ours).features["compute.loss_only"].state is State.OFF


def test_the_report_says_that_a_step_has_no_output_for_each_token() -> None:
    eager, ours = pair(FirstToken(), engine())
    assert_step_as_eager(eager, ours, **batch(4, 10))
    feature = report(ours).features["compute.loss_only"]
    assert (feature.state, feature.reason) == (State.OFF, "nothing that a step gives has a place for each token")


def test_gradients_add_up_over_several_batches() -> None:
    eager, ours = pair(Model(), engine())
    for model in (eager, ours):
        torch.manual_seed(1)
        for seed in range(3):
            (model(**batch(4, 10, seed=seed)).loss / 3).backward()
    for wanted, got in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_model_has_its_own_policy() -> None:
    eager, ours = pair(Model(), engine())
    other = ort_accel.accelerate(copy.deepcopy(ours), engine())
    assert ours(**batch(4, 10)).logits.isfinite().all()
    assert_step_as_eager(eager, other, **batch(4, 10))
    assert [states(model)["compute.loss_only"] for model in (ours, other)] == [State.REFUSED, State.APPLIED]


def test_autocast_gives_the_loss_of_eager_mode_in_its_dtype() -> None:
    eager, ours = pair(Model(), engine())
    with torch.autocast("cpu", torch.bfloat16):
        for seed in range(2):
            traces = [step(model, **batch(4, 10, seed=seed), seed=seed) for model in (ours, eager)]
            assert_same(*traces, rtol=2e-2, atol=2e-2)
    assert report(ours).counters["batches run on some rows"] == 2


def test_attention_of_mixed_dtypes_equals_eager_mode() -> None:
    class Turned(Model):
        def attend(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2))
            angles = torch.arange(x.shape[1])[:, None] * 0.1
            found = F.scaled_dot_product_attention(q * angles.cos(), k * angles.cos(), v, attn_mask=hidden(mask))
            return self.out(found.transpose(1, 2).flatten(2))

    eager, ours = pair(Turned(), engine())
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(*(step(model, **batch(4, 10)) for model in (ours, eager)), rtol=2e-2, atol=2e-2)
    assert report(ours).counters["batches run on some rows"] == 1


def test_checkpointed_parts_recompute_only_the_rows_that_count() -> None:
    eager, ours = pair(Checkpointed(), engine())
    for seed, given in enumerate((batch(4, 10), batch(3, 9))):
        assert_step_as_eager(eager, ours, **given, seed=seed)
    assert report(ours).counters["batches run on some rows"] == 2
    (memory,) = report(ours).memory.values()
    assert memory.repeated > 10
    assert memory.stash < 0.5 * memory.stash_without


def test_checkpointed_dropout_keeps_its_mask_if_padding_is_read() -> None:
    sizes: dict[str, Any] = {"dynamic_shapes": "auto"}  # Dynamo cannot nest checkpoints where all sizes are open
    eager, ours = pair(NestedFirstToken(), engine(density={"padding": True}, engine=sizes))
    assert_step_as_eager(eager, ours, **batch(4, 10))
    read = batch(4, 10, seed=1)
    read["mask"][2] = 0
    assert_step_as_eager(eager, ours, **read)
    assert report(ours).counters["batches run on all rows"] == 1


def test_lazy_logits_behind_a_checkpoint_have_eager_gradients() -> None:
    eager, ours = pair(Checkpointed(), engine())

    def loss(output: Output) -> Tensor:
        return output.logits.logsumexp(-1).sum()

    assert_same(*(step(model, **batch(4, 10), loss=loss) for model in (ours, eager)))
    assert states(ours)["compute.loss_only"] is State.REFUSED


def test_a_checkpoint_with_a_policy_leaves_the_graph_whole() -> None:
    eager, ours = pair(Checkpointed(context_fn=kept_products), engine())
    assert_step_as_eager(eager, ours, **batch(4, 10))
    assert "a backward of its own" in report(ours).features["density.labels"].reason
