"""OpenMP's threads leave the cores to sessions, and a forked process does not wait for threads that it lacks."""

import copy
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ort_accel import engine
from ort_accel.runtime import openmp
from ort_accel.runtime.openmp import SharedCores, pause_openmp
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


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def becomes_true(condition: Callable[[], bool]) -> bool:
    """True once a condition holds; False if it does not within a minute."""
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def on_crowded_cores() -> SharedCores:
    cores = SharedCores()
    cores.is_crowded = True
    return cores


def count_threads(results: Any) -> None:
    loop()
    with on_crowded_cores().taken():
        pass
    time.sleep(1)
    before, found = threads(), []
    for _ in range(2):
        with on_crowded_cores().taken():
            found.append(becomes_true(lambda: threads() == before + 1))
        found.append(becomes_true(lambda: threads() == before))
    with SharedCores().taken():
        time.sleep(0.1)
        found.append(threads() <= before)
    results.put(found)


def fork_on_crowded_cores(results: Any) -> None:
    loop()
    with on_crowded_cores().taken():
        results.put(ends(loop_on_crowded_cores))


def loop_on_crowded_cores() -> None:
    before = threads()
    with on_crowded_cores().taken():
        loop()
        assert becomes_true(lambda: threads() >= before + 2)


needs_libgomp = pytest.mark.skipif(
    not any(hasattr(library, "GOMP_parallel") for library in openmp._libraries()), reason="torch has another OpenMP"
)


@needs_libgomp
@pytest.mark.timeout(300)
def test_one_more_thread_exists_on_crowded_cores_and_only_then():
    """libgomp's threads hardly spin while there are more of them than cores."""
    assert asked(count_threads) == [True] * 5


@needs_libgomp
@pytest.mark.timeout(300)
def test_a_forked_process_has_an_additional_thread_of_its_own():
    assert asked(fork_on_crowded_cores) == 0


@pytest.mark.parametrize(("waited_ms", "is_crowded"), [(0, False), (1, False), (30, True)])
def test_cores_are_crowded_if_a_session_waited_for_them(
    waited_ms: int, is_crowded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics = tmp_path / "schedstat"
    statistics.write_text("5000 7000 3")
    monkeypatch.setattr(openmp, "SCHEDULER_STATISTICS", statistics)
    cores = SharedCores()
    with cores.taken():
        time.sleep(0.05)
        statistics.write_text(f"6000 {7000 + waited_ms * 1_000_000} 4")
    assert cores.is_crowded is is_crowded
    with cores.taken():
        pass
    assert not cores.is_crowded


def test_cores_count_as_free_where_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "SCHEDULER_STATISTICS", tmp_path / "none")
    cores = SharedCores()
    with cores.taken():
        pass
    assert not cores.is_crowded


@pytest.mark.timeout(300)
def test_a_forked_process_ends_though_its_parent_has_run_parallel_loops():
    assert asked(fork_after_a_loop) == 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch for CUDA forks no process with a compiled backward")
@pytest.mark.timeout(300)
def test_a_forked_process_trains_the_model_of_its_parent():
    code, segments = asked(fork_with_a_model)
    assert segments
    assert code == 0
