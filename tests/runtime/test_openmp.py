"""OpenMP's threads at rest: what a process forks does not wait for threads that it does not have."""

import copy
import multiprocessing
from typing import Any

import pytest
import torch
from torch import nn

from ort_accel import engine
from ort_accel.runtime.openmp import pause_openmp
from tests.forked import asked

SECONDS = 60


def loop() -> None:
    torch.set_num_threads(2)
    torch.ones(1 << 22).exp_()


def loop_and_pause() -> None:
    loop()
    pause_openmp()


def train(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(512, 64)).pow(2).mean().backward()


def trains_as_eager(model: nn.Module, eager: nn.Module) -> None:
    """Ends badly if one more step of a model gives other gradients than in eager mode."""
    model.zero_grad()
    eager.zero_grad()
    train(model), train(eager)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def ends(*call: Any) -> int | None:
    """The exit code of a forked process that makes a call; None if it does not end."""
    function, *args = call
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join(SECONDS)
    code = process.exitcode
    process.kill()
    return code


def fork_after_a_loop(results: Any) -> None:
    loop()
    results.put(ends(loop_and_pause))


def fork_with_a_model(results: Any) -> None:
    torch.set_num_threads(2)
    eager = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))
    ours = engine.accelerate(copy.deepcopy(eager), {"version": 1})
    train(ours)
    loop()
    results.put([ends(trains_as_eager, ours, eager), len(engine.report(ours).segments)])


@pytest.mark.timeout(300)
def test_a_forked_process_ends_though_its_parent_has_run_parallel_loops():
    assert asked(fork_after_a_loop) == 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch for CUDA forks no process with a compiled backward")
@pytest.mark.timeout(300)
def test_a_forked_process_trains_the_model_of_its_parent():
    code, segments = asked(fork_with_a_model)
    assert segments
    assert code == 0
