"""Models of the families that people train learn on the engine what they learn in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.segments import Runner
from tests.against_eager import assert_step_as_eager, compilations, pair, report, step
from tests.models.zoo import FAMILIES, Family
from tests.tiers import mostly_long

COPY_THEIR_CONFIGURATION = {"t5", "whisper"}
"""Whose decoders copy it for their cache, which Dynamo follows from torch 2.13 on."""

WITH_BREAKS = {"deberta-v2", "mixtral", "wav2vec2"}
"""Whose own code asks for numbers in the middle (which experts are needed, whether a layer is skipped)."""
if torch.__version__ < (2, 13):
    WITH_BREAKS |= COPY_THEIR_CONFIGURATION

LOOPS_OVER_TOKENS = {"mamba"}
"""Whose own code repeats itself for every token, so that no capture can serve two lengths."""

IN_EVERY_RUN = {"bert", "llama", "vit"}
"""An encoder, a decoder, both, and one for images."""

MOSTLY_PYTORCH = {"resnet", "mixtral"}
"""Convolutions, which PyTorch runs faster; and the products of experts, each as large as the router has it, which are
one operator of transformers' own."""


def recaptures(family: Family, sizes: list[tuple[int, int]]) -> bool:
    """True if the last batch makes Dynamo capture anew, with PyTorch alone as backend."""
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model = family.build()
    model.compile(backend=note)
    for rows, length in sizes:
        before = len(graphs)
        model(**family.batch(rows, length))
    return len(graphs) > before


@pytest.mark.parametrize(
    "family", mostly_long(FAMILIES, *(family for family in FAMILIES if family.name in IN_EVERY_RUN)), ids=str
)
def test_loss_and_every_gradient_equal_eagers(family: Family):
    eager, ours = pair(family.build())
    *warm_up, last = family.sizes
    for seed, size in enumerate(warm_up):
        torch.manual_seed(seed)
        assert_step_as_eager(eager, ours, **family.batch(*size), seed=seed)
    before = compilations(ours)
    assert_step_as_eager(eager, ours, **family.batch(*last), seed=7)
    assert compilations(ours) == before or (family.name in LOOPS_OVER_TOKENS and recaptures(family, family.sizes))

    found = report(ours)
    breaks = [item for item in found.fallbacks if item.reason is Reason.GRAPH_BREAK]
    assert bool(breaks) == (family.name in WITH_BREAKS), breaks
    work = {runner: sum(s.flops for s in found.segments if s.runner is runner) for runner in Runner}
    assert work[Runner.ORT] > work[Runner.PYTORCH] or family.name in MOSTLY_PYTORCH


def named(name: str) -> Family:
    (family,) = [family for family in FAMILIES if family.name == name]
    return family


def losses(model: nn.Module, family: Family, steps: int, in_bf16: bool = False) -> torch.Tensor:
    """The loss curve of a training run on a few batches of changing length, under autocast if asked for.

    At a rate of 3e-3, rounding grows until two eager runs that start 1e-7 apart are 0.09 apart after 200 steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    torch.manual_seed(1)
    batches = [family.batch(4, length) for length in (6, 9, 12, 8)]
    curve = []
    for number in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            loss = step(model, **batches[number % len(batches)], seed=number).loss
        optimizer.step()
        curve.append(loss)
    return torch.stack(curve)


@pytest.mark.long
@pytest.mark.parametrize("steps", [200])
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_a_training_run_follows_eagers_loss_curve(name: str, steps: int):
    family = named(name)
    eager, ours = pair(family.build())
    expected = losses(eager, family, steps)
    torch.testing.assert_close(losses(ours, family, steps), expected, rtol=0, atol=1e-3)
    assert expected[-20:].mean() < expected[:20].mean() - 0.05, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=pytest.mark.long)])
def test_a_training_run_in_bf16_rounds_no_worse_than_eagers(name: str):
    family = named(name)
    start = family.build()
    eager, ours = pair(copy.deepcopy(start))
    steps = 100
    exact = losses(start, family, steps)
    in_eager, found = (losses(model, family, steps, in_bf16=True) for model in (eager, ours))
    rounding = (in_eager - exact).norm()
    assert 0 < (found - exact).norm() <= 1.3 * rounding
    assert (found - in_eager).norm() <= 2 * rounding
    assert exact[-20:].mean() < exact[:20].mean() - 0.05, "nothing was learned, so nothing was compared"


@pytest.mark.long
def test_two_identical_runs_give_identical_losses():
    family = named("llama")
    start = family.build()
    curves = [losses(pair(copy.deepcopy(start))[1], family, 12) for _ in range(2)]
    assert torch.equal(*curves)
