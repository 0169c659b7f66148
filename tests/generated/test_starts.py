"""A second start uses the code that the first one has kept, in processes of their own with a real compiler."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ort_accel.compiler import generated_kernels
from ort_accel.generated import trial
from ort_accel.generated.builds import why_no_code
from ort_accel.generated.trial import CLUSTERS, OPERATORS, PROGRAM
from ort_accel.generated.worker import Outcome
from ort_accel.native.library import native_library
from ort_accel.reporting.report import State
from tests.forked import asked
from tests.generated.trained import Model, Training, choices, config
from tests.generated.watched import spy

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")

REAL_ROWS = (256, 77, 130)


@dataclass(frozen=True)
class Start:
    """What a start in a process of its own gave, whose kernels Inductor wrote."""

    first: list[str]
    """Who ran the segments at first: until kernels were there, or in one step."""
    later: list[str]
    """Who ran them in the last steps."""
    choices: dict[str, str]
    state: State
    said: list[str]
    commands: list[list[str]]
    """Those of processes that compile."""


def first_start(results: Any, folder: Path, way: str) -> None:
    """A start without kept code."""
    results.put(started(folder, way, is_first=True))


def next_start(results: Any, folder: Path, way: str) -> None:
    """A start that finds what the first one has kept."""
    results.put(started(folder, way, is_first=False))


def started(folder: Path, way: str, is_first: bool) -> Start | str:
    """Trains, and compares each step's loss, gradients and draws with eager mode's. Returns an error's text."""
    commands: list[list[str]] = []
    start = subprocess.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda command, **rest: commands.append(command) or start(command, **rest))
        patch.setattr(trial, "LEAST_GAIN", float("inf"))
        patch.setattr(generated_kernels, "DELAY_SECONDS", {way: 0.0})
        patch.setattr(Outcome, "is_faster", property(lambda outcome: not outcome.error))
        ran = spy(patch)
        try:
            engine = {"save_onnx": str(folder / "models")}
            training = Training(config(folder / "cache", {"debug": True}, **engine), Model(1024))
            training(REAL_ROWS[0])
            first = list(ran)
            if is_first:
                training.until_decided(*REAL_ROWS)
            ran.clear()
            training(*REAL_ROWS)
        except Exception:
            return traceback.format_exc()
        compiled = [command for command in commands if "ort_accel.generated.worker" in command]
        return Start(first, ran, choices(training), training.feature.state, training.said, compiled)


@pytest.fixture(scope="module", params=[CLUSTERS, PROGRAM])
def way(request: pytest.FixtureRequest) -> str:
    """The only way that is tried."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(way: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which starts keep code, and its text for people."""
    if why_no_code():
        pytest.skip(why_no_code())
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def real(folder: Path, way: str) -> Start:
    """The first start."""
    found = asked(first_start, folder, way)
    assert isinstance(found, Start), found
    return found


def test_compiled_code_takes_over_and_each_step_is_eagers(real: Start, way: str) -> None:
    assert set(real.first) == {OPERATORS}
    assert real.later == [way, way] * len(REAL_ROWS)
    assert real.choices == {"forward": way, "backward": way}
    assert real.state is State.APPLIED
    assert not real.said
    assert len(real.commands) == 1, "forward and backward are compiled together"


def test_sources_are_kept_beside_saved_models(real: Start, folder: Path, way: str) -> None:
    models = folder / "models"
    (library,) = models.glob("*.cpp")
    modules = sorted(models.glob("*.py"))
    assert library.stem in [path.stem for path in modules]
    names = [path.stem if way == CLUSTERS else f"{path.stem}_k0" for path in modules]
    assert all(f" {name}(" in library.read_text() for name in names)
    assert any("aten.sin.default" in path.read_text() for path in modules)
    assert list(models.glob("*.onnx"))


def test_a_second_process_compiles_nothing_and_runs_kept_code_in_its_first_step(
    real: Start, folder: Path, way: str
) -> None:
    assert asked(next_start, folder, way) == Start([way, way], real.later, {}, State.APPLIED, [], [])


ENDS_SOON = """
import subprocess, threading
import pytest
from tests.generated.trained import Model, Training, config
from tests.generated.watched import all_clusters_count

def sleep(command, start=subprocess.Popen, **rest):
    process = start(["sleep", "600"], **rest)
    print(process.pid, flush=True)
    started.set()
    return process

started = threading.Event()
all_clusters_count(pytest.MonkeyPatch())
subprocess.Popen = sleep
Training(config(), Model(16))(6, 9)
assert started.wait(60)
print("the end")
"""


@pytest.mark.long
def test_a_training_that_ends_while_kernels_are_compiled_leaves_no_process() -> None:
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_SOON],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        cwd=root,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    pid, end = ended.stdout.split(maxsplit=1)
    assert end.strip() == "the end"
    for _ in range(300):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.1)
                continue
        return
    os.kill(int(pid), signal.SIGKILL)
    pytest.fail("it is still there")
