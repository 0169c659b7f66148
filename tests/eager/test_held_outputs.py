"""Logits that a script keeps, in whatever way, are those of their own step, as in eager mode."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ort_accel
from ort_accel.compiler import backend
from ort_accel.eager.held_outputs import HeldOutputs
from ort_accel.reporting.report import State
from ort_accel.runtime.lazy_tensor import LazyTensor
from tests.against_eager import ATOL, RTOL, report
from tests.capture.language_model import Model, Output, batch, engine
from tests.tiers import mostly_long

STEPS = 4

Keep = Callable[[Output], Any]
Change = Callable[[nn.Module, torch.optim.Optimizer], None]


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    return file


def loaded(file: io.BytesIO) -> Any:
    file.seek(0)
    return torch.load(file)


def into_new(x: Tensor) -> Tensor:
    return torch.empty(x.shape).copy_(x)


WITHIN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "itself": (lambda x: x, lambda x: x),
    "detach": (lambda x: x.detach(), lambda x: x),
    "data": (lambda x: x.data, lambda x: x),
    "detach, clone": (lambda x: x.detach().clone(), lambda x: x),
    "clone": (lambda x: x.clone(), lambda x: x),
    "float": (lambda x: x.float(), lambda x: x),
    "double": (lambda x: x.detach().double(), lambda x: x),
    "cpu": (lambda x: x.detach().cpu(), lambda x: x),
    "to cpu": (lambda x: x.to("cpu"), lambda x: x),
    "copy_": (lambda x: into_new(x.detach()), lambda x: x),
    "a row": (lambda x: x[0], lambda x: x),
    "a view": (lambda x: x.detach().flatten(0, 1)[2:5], lambda x: x),
    "numpy": (lambda x: x.detach().numpy(), torch.from_numpy),
    "tolist": (lambda x: x.tolist(), torch.tensor),
    "item": (lambda x: x[0, 0, 3].item(), torch.tensor),
    "saved at once": (lambda x: saved(x.detach()), loaded),
    "saved later": (lambda x: x.detach(), lambda x: loaded(saved(x))),
    "pickled later": (lambda x: x.detach(), lambda x: pickle.loads(pickle.dumps(x))),
    "deepcopied": (lambda x: copy.deepcopy(x.detach()), lambda x: x),
    "deepcopied later": (lambda x: x.detach(), copy.deepcopy),
    "cloned later": (lambda x: x, lambda x: x.detach().clone()),
    "within a structure": (lambda x: {"logits": [x.detach()]}, lambda x: x["logits"][0]),
}
"""For each way of keeping logits: how within their step, and how they are read at the end."""


def manual(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def behind_versions(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)


def other_memory(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad


def as_sam(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights are moved by hand, and then by an optimizer."""
    manual(model, optimizer)
    optimizer.step()


def by_optimizer(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


CHANGES: list[Change] = [by_optimizer, manual, behind_versions, other_memory, as_sam]


def pair(**sections: Any) -> tuple[nn.Module, nn.Module]:
    eager = Model()
    return eager, ort_accel.accelerate(copy.deepcopy(eager), engine(**sections))


def trained(
    model: nn.Module, keep: Keep, change: Change = by_optimizer, steps: int = STEPS, rate: float = 0.5
) -> tuple[list[Any], list[Tensor], Tensor]:
    """What was kept of each step, the weights at the end, and the state of the random numbers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    kept = []
    torch.manual_seed(11)
    for number in range(steps):
        given = batch(4, 10, seed=number)
        outputs = model(**given)
        kept.append(keep(outputs))
        outputs.loss.backward()
        change(model, optimizer)
        optimizer.zero_grad()
    return kept, [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()


def assert_same_training(ours: Any, eager: Any, read: Callable[[Any], Any] = lambda x: x) -> None:
    for mine, wanted in zip(ours[0], eager[0], strict=True):
        close(read(mine), read(wanted))
    for mine, wanted in zip(ours[1], eager[1], strict=True):
        close(mine, wanted)
    assert torch.equal(ours[2], eager[2]), "other random numbers were drawn"


def close(ours: Any, eager: Any, name: str = "") -> None:
    torch.testing.assert_close(
        torch.as_tensor(ours + 0), eager + 0, rtol=RTOL, atol=ATOL, msg=lambda text: f"{name}: {text}"
    )


def test_each_way_of_keeping_logits(monkeypatch) -> None:
    """As a backend of `torch.compile` a smaller graph leaves logits out in every step, so each way meets such."""
    monkeypatch.setattr(backend, "_REGISTERED", {})  # a backend of an earlier test may have seen logits being read
    eager = Model()
    ours = torch.compile(copy.deepcopy(eager), backend="ort_accel", options={"config": engine()})
    kinds = []

    def keeps(kinds: list[type]) -> Keep:
        ways = iter(WITHIN.values())

        def keep(outputs: Output) -> Any:
            kinds.append(type(outputs.logits))
            return next(ways)[0](outputs.logits)

        return keep

    results = [trained(model, keeps(kinds), steps=len(WITHIN), rate=0.1) for model in (ours, eager)]
    assert kinds == [LazyTensor] * len(WITHIN) + [Tensor] * len(WITHIN)
    for way, mine, wanted in zip(WITHIN, results[0][0], results[1][0], strict=True):
        read = WITHIN[way][1]
        close(read(mine), read(wanted), way)
    assert_same_training(([], *results[0][1:]), ([], *results[1][1:]))


@pytest.mark.parametrize("change", mostly_long(CHANGES, by_optimizer, behind_versions))
def test_logits_read_behind_whatever_changes_weights(change: Change) -> None:
    eager, ours = pair()
    results = [trained(model, lambda out: out.logits, change) for model in (ours, eager)]
    assert_same_training(*results)
    assert report(ours).features["compute.loss_only"].state is State.REFUSED


@pytest.mark.parametrize("change", mostly_long(CHANGES, as_sam))
def test_the_last_logits_read_behind_whatever_changes_weights(change: Change) -> None:
    """Of the steps before, `outputs` was held until the next call, and not looked at."""
    eager, ours = pair()
    results = []
    for model in (ours, eager):
        last: list[Output] = []
        read: list[Tensor] = []

        def change_and_read(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            change(model, optimizer)
            if len(read) == STEPS - 1:  # noqa: B023
                read.append(last[0].logits.detach())  # noqa: B023
            else:
                read.append(torch.zeros(()))  # noqa: B023

        _, *rest = trained(model, lambda out: last.__setitem__(slice(None), [out]), change_and_read)  # noqa: B023
        results.append((read, *rest))
    assert_same_training(*results)


def test_outputs_that_are_held_until_the_next_step_cost_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the usual loop: `outputs` is replaced by the next call. Weights are copied, and nothing is computed."""
    eager, ours = pair()
    results = [trained(model, lambda out: type(out.logits)) for model in (ours, eager)]
    assert set(results[0][0]) == {LazyTensor}
    assert report(ours).features["compute.loss_only"].state is State.APPLIED
    assert_same_training(([], *results[0][1:]), ([], *results[1][1:]))


def test_outputs_that_are_dropped_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[object] = []
    monkeypatch.setattr(HeldOutputs, "before_backward", lambda *_: copied.append("before a backward"))
    _, ours = pair()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    for number in range(2):
        ours(**batch(4, 10, seed=number)).loss.backward()
        optimizer.step()
    assert not copied


def test_once_an_optimizer_was_seen_no_backward_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair()
    trained(ours, lambda _: None, steps=1)
    told: list[object] = []
    monkeypatch.setattr(HeldOutputs, "before_backward", lambda *_: told.append("before a backward"))
    outputs = ours(**batch(4, 10))
    outputs.loss.backward()
    assert not told


@pytest.mark.parametrize("way", mostly_long(["alone", "together", "behind the first backward"], "together"))
def test_a_second_loss(way: str) -> None:
    eager, ours = pair()

    def keep(outputs: Output) -> Tensor:
        second = F.log_softmax(outputs.logits.float(), -1)[..., 3].square().mean()
        if way == "alone":
            second.backward(retain_graph=True)
        return second

    results = []
    for model in (ours, eager):
        kept = []
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number in range(3):
            outputs = model(**batch(4, 10, seed=number))
            if way == "behind the first backward":
                outputs.loss.backward(retain_graph=True)
                second = keep(outputs)
                second.backward()
            else:
                second = keep(outputs)
                (outputs.loss + second if way == "together" else outputs.loss).backward()
            kept.append(second.detach())
            optimizer.step()
            optimizer.zero_grad()
        results.append((kept, [item.detach() for item in model.parameters()], torch.get_rng_state()))
    assert_same_training(*results)


def test_steps_that_are_joined() -> None:
    eager, ours = pair()
    joined = [torch.cat([out.logits for out in trained(model, lambda out: out)[0]]) for model in (ours, eager)]
    close(*joined)
    stacked = [torch.stack(trained(model, lambda out: out.logits)[0]) for model in (ours, eager)]
    close(*stacked)


def test_micro_batches_of_one_step() -> None:
    eager, ours = pair()

    def every_other(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        counts[id(model)] = counts.get(id(model), 0) + 1
        if counts[id(model)] % 2 == 0:
            optimizer.step()

    counts: dict[int, int] = {}
    results = [trained(model, lambda out: out.logits.detach(), every_other) for model in (ours, eager)]
    assert_same_training(*results)


def test_inputs_that_a_script_writes_into() -> None:
    """Such as one batch in fixed memory, and labels whose ignored places are filled for a tokenizer."""
    eager, ours = pair()
    results = []
    for model in (ours, eager):
        given = batch(4, 10)
        torch.manual_seed(3)
        outputs = model(**given)
        given["labels"][given["labels"] == -100] = 0
        given["ids"].zero_()
        results.append(outputs.logits.detach())
    close(*results)


def test_a_backward_through_logits_of_the_past_is_an_error_as_in_eager_mode() -> None:
    for model in pair():
        kept, *_ = trained(model, lambda out: out.logits, steps=1)
        assert kept[0].requires_grad
        with pytest.raises(RuntimeError, match=r"optimizer's step|a second time"):
            kept[0].sum().backward()


def test_a_change_that_nothing_tells_of_is_an_error() -> None:
    """Without a backward or an optimizer in between."""
    _, ours = pair()
    outputs = ours(**batch(4, 10))
    with torch.no_grad():
        ours.head.weight.mul_(2)
    with pytest.raises(ort_accel.OrtAccelError, match=r"set compute\.loss_only to false"):
        outputs.logits.sum()
