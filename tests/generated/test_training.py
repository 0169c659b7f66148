"""A model trains while its code is generated, and each step is eager mode's."""

from __future__ import annotations

import errno
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ort_accel
from ort_accel.compiler import generated_kernels
from ort_accel.compiler.settings import resolve
from ort_accel.config import load_config
from ort_accel.eager import comparison, turns
from ort_accel.errors import ConfigError
from ort_accel.generated import builds
from ort_accel.generated.builds import why_no_code
from ort_accel.generated.takeover import COMPILING
from ort_accel.generated.trial import CLUSTERS, OPERATORS, PROGRAM
from ort_accel.native.library import native_library
from ort_accel.reporting.report import Report, State
from ort_accel.reporting.timings import EAGER, ENGINE
from ort_accel.runtime import signed_files
from ort_accel.runtime.sessions import Sessions
from tests.generated.traced import normal
from tests.generated.trained import Model, Training, choices, config
from tests.generated.watched import MANY, Compiler, all_clusters_count, files, wait
from tests.tiers import mostly_long

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")
needs_compiler = pytest.mark.skipif(bool(why_no_code()), reason=why_no_code())


ROWS = (6, 9, 14)


def test_training_goes_on_while_kernels_are_compiled(compiler: Compiler, kernels_win: None, runs: list[str]) -> None:
    compiler.may_go_on.clear()
    training = Training(config(), Model(16))
    training(*ROWS)
    assert set(runs) == {OPERATORS}
    assert training.feature.reason == COMPILING
    compiler.may_go_on.set()
    training.until_decided(*ROWS)
    assert choices(training) == {"forward": CLUSTERS, "backward": CLUSTERS}
    runs.clear()
    training(*ROWS)
    assert set(runs) == {CLUSTERS}
    assert "compute.generated.enabled" in str(training.report)
    assert training.feature.state is State.APPLIED
    nodes = sum(race.count for race in training.report.races)
    assert training.feature.effect.startswith(f"generated kernels compute {nodes} nodes")


class OfAnInput(nn.Module):
    """A chain of operators that read the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.last = nn.Parameter(torch.randn(32)), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.sin() * self.weight).exp() * x).tanh().mean()


BATCHES: dict[str, Callable[[int], Tensor]] = {
    "with gaps between rows": lambda rows: normal(rows, 32 + rows)[:, 3:35],
    "of every other row": lambda rows: normal(2 * rows, 32)[::2],
    "from the third row on": lambda rows: normal(rows + 2, 32)[2:],
    "transposed": lambda rows: normal(32, rows).t(),
    "of equal rows": lambda rows: normal(1, 32).expand(rows, 32),
}


@pytest.mark.parametrize("name", mostly_long(BATCHES, "with gaps between rows", "of equal rows"))
def test_a_batch_may_lie_in_memory_in_any_way(
    name: str, compiler: Compiler, kernels_win: None, runs: list[str]
) -> None:
    training = Training(config(), OfAnInput(), BATCHES[name])
    training.until_decided(*ROWS)
    runs.clear()
    training(*ROWS)
    assert runs == [CLUSTERS, CLUSTERS] * len(ROWS)


def test_sizes_of_one_train_as_in_eager_mode(compiler: Compiler, kernels_win: None) -> None:
    training = Training(config(), Model(16))
    training.until_decided(*ROWS)
    training(1, 2, 1, 6)


def test_an_error_of_all_kernels_stops_no_training(compiler: Compiler, kernels_win: None) -> None:
    training = Training(config(), Model(16))
    training.until_decided(*ROWS)
    for kernel in compiler.kernels.values():
        kernel.fails = True
    training(*ROWS)
    before = compiler.calls
    training(*ROWS)
    assert compiler.calls == before


def test_evaluations_use_no_generated_kernels_of_the_training(compiler: Compiler, kernels_win: None) -> None:
    training = Training(config(), Model(16))
    training.until_decided(*ROWS)
    for model in (training.eager, training.ours):
        model.eval()
    x = normal(9, 32)
    with torch.no_grad():
        torch.testing.assert_close(training.ours(x), training.eager(x))


def test_a_second_start_compiles_nothing_and_uses_kept_kernels_in_its_first_step(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path
) -> None:
    Training(config(tmp_path), Model(16)).until_decided(*ROWS)
    assert len(files(tmp_path)) == 2
    compiler.requests.clear()
    for remove in ("nothing", "*.graph"):
        for path in tmp_path.glob(remove):
            path.unlink()
        runs.clear()
        second = Training(config(tmp_path), Model(16))
        second(*ROWS)
        wait()
        assert set(runs) == {CLUSTERS}, remove
        assert not compiler.requests
        assert not second.report.races
        assert second.feature.state is State.APPLIED


def test_a_start_without_a_compiler_trains_with_what_is_kept(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Training(config(tmp_path, {"enabled": "auto"}), Model(16))(*ROWS)
    monkeypatch.setattr(generated_kernels, "why_no_code", lambda: "there is no C++ compiler; install g++")
    second = Training(config(tmp_path, {"enabled": "auto"}), Model(16))
    second(*ROWS)
    assert second.feature.state is State.OFF
    assert second.feature.reason == "there is no C++ compiler; install g++"


def test_a_folder_that_cannot_be_written_to_leaves_a_run_that_trains(
    compiler: Compiler, kernels_win: None, runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(signed_files, "write_aside", refuse)
    training = Training(config(tmp_path), Model(16))
    training.until_decided(*ROWS)
    assert training.feature.state is State.APPLIED
    runs.clear()
    training(*ROWS)
    assert set(runs) == {CLUSTERS}
    notes = [note for note in training.report.notes if "Read-only file system" in note]
    assert len(notes) == 1
    assert not files(tmp_path)


@needs_compiler
def test_a_process_that_is_killed_leaves_a_run_that_trains(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    all_clusters_count(monkeypatch)
    start, killed = subprocess.Popen, []

    def kill(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        process.kill()
        killed.append(process)
        return process

    monkeypatch.setattr(builds.subprocess, "Popen", kill)
    training = Training(config(), Model(16))
    training.until_decided(*ROWS)
    assert killed
    assert set(runs) == {OPERATORS}
    assert training.said == ["no kernels were generated: NoKernels: the compiling process ended with -9: no words"]
    assert training.feature.state is State.OFF


@needs_compiler
def test_a_compiler_that_fails_leaves_a_run_that_trains(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_clusters_count(monkeypatch)
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho no room for code >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    training = Training(config(tmp_path), Model(16))
    training.until_decided(*ROWS)
    assert set(runs) == {OPERATORS}
    (note,) = training.said
    assert note.startswith("no kernels were generated: NoKernels: the compiling process ended with 1: ")
    assert str(broken) in note
    assert not files(tmp_path), "it is tried again by the next start"


def test_a_model_that_trains_in_eager_mode_gets_its_kernels_and_is_compared_anew(
    compiler: Compiler, kernels_win: None, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "why_not", lambda *_: "")
    monkeypatch.setattr(comparison.SmallStart, "begin", lambda *_: False)
    monkeypatch.setattr(turns, "TIE_RATIO", 0.0)  # eager mode counts as faster
    monkeypatch.setitem(generated_kernels.DELAY_SECONDS, CLUSTERS, 1e9)
    monkeypatch.setattr(generated_kernels, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(comparison, "TRIAL_COST_SHARE", float("inf"))
    training = Training(config(generated={"enabled": "auto"}, compare_with_eager="auto"), Model(16))
    training(*ROWS * 10)
    assert training.report.comparison is not None, training.report.features[comparison.FEATURE]
    assert training.report.comparison.runner == EAGER
    runs.clear()
    training(ROWS[0])
    assert not runs
    for queue in training.generator._queues.values():
        queue.delay_seconds = queue.spent_seconds + 1e-9
    monkeypatch.setattr(turns, "TIE_RATIO", float("inf"))
    training(*ROWS)
    wait()
    assert len(compiler.requests) == 1
    for _ in range(4 * MANY):
        training(ROWS[0])
    assert training.report.comparison.runner == ENGINE
    assert choices(training) == {"forward": CLUSTERS, "backward": CLUSTERS}
    assert set(runs[-4:]) == {CLUSTERS}


def test_steps_that_must_give_the_same_bits_use_no_generated_kernels(compiler: Compiler, runs: list[str]) -> None:
    training = Training(config(generated={"enabled": "auto"}, deterministic=True), Model(16))
    training(*ROWS)
    assert set(runs) == {OPERATORS}
    assert (training.feature.state, training.feature.reason) == (State.OFF, "steps must give the same bits")


OFF = {
    "deterministic": ({"engine": {"deterministic": True}}, "times decide which kernels run"),
    "native": ({"compute": {"native": False, "generated": {"enabled": True}}}, "sessions call these kernels"),
}


@pytest.mark.parametrize("name", OFF)
def test_who_asks_for_kernels_that_cannot_be_generated_is_told_so(name: str) -> None:
    other, reason = OFF[name]
    with pytest.raises(ConfigError, match=f"compute.generated.enabled: {reason}.*; write auto or false"):
        ort_accel.accelerate(Model(16), {**config(), **other})


def test_without_a_compiler_kernels_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"there is no C\+\+ compiler; install g\+\+; write auto or false"):
        ort_accel.accelerate(Model(16), config())
    training = Training(config(generated={"enabled": "auto"}), Model(16))
    training(*ROWS)
    assert training.feature.reason == "there is no C++ compiler; install g++"


@pytest.mark.parametrize(
    ("other", "ways"),
    [
        ({}, [CLUSTERS, PROGRAM]),
        ({"memory": {"level": 1}}, [CLUSTERS]),
        ({"memory": {"early_gradient_release": True}}, [CLUSTERS]),
        ({"compute": {"generated": {"enabled": True, "ops_file": "OPERATORS"}}}, [CLUSTERS]),
    ],
    ids=["as it comes", "recompute", "early gradients", "a list of operators"],
)
def test_programs_are_not_tried_where_they_would_not_keep_to_what_is_asked_for(
    other: dict[str, Any], ways: list[str], tmp_path: Path
) -> None:
    (tmp_path / "operators.json").write_text("[]")
    text = json.dumps({**config(), **other}).replace("OPERATORS", str(tmp_path / "operators.json"))
    settings = resolve(load_config(json.loads(text)))
    generator = generated_kernels.generator_for(settings, Sessions(settings.session), Report())
    assert generator is not None
    assert list(generator.ways) == ways


def test_a_file_says_which_operators_kernels_may_contain(compiler: Compiler, tmp_path: Path) -> None:
    names = ["aten.sin.default", "aten.cos", "aten.mul.Tensor", "aten.add.Tensor"]
    (tmp_path / "operators.json").write_text(json.dumps(names))
    Training(config(generated={"ops_file": str(tmp_path / "operators.json")}), Model(16))(*ROWS)
    wait()
    assert compiler.clusters
    found = {str(node.target) for cluster in compiler.clusters.values() for node in cluster.nodes}
    assert {"aten.sin.default", "aten.mul.Tensor"} <= found <= set(names)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("[aten.sin", "Expecting value"),
        ('{"aten.sin.default": true}', r'must be a list of operators, such as \["aten.mul.Tensor"\]'),
        ("[1]", "must be a list of operators"),
        ('["aten.sin.default", "aten.sinn.default"]', "PyTorch has no aten.sinn.default"),
    ],
    ids=["missing", "no JSON", "no list", "no names", "unknown operator"],
)
def test_a_file_of_operators_that_cannot_be_used_is_an_error(content: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "operators.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"(?s)compute.generated.ops_file.*{said}"):
        ort_accel.accelerate(Model(16), config(generated={"ops_file": str(file)}))
