"""Clusters are compiled in a process of their own, whatever becomes of it, and sessions then know their kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ort_accel.generated import builds
from ort_accel.generated.builds import NoKernels, compile_parts, load_kernels, why_no_code
from ort_accel.generated.clusters import Cluster
from ort_accel.generated.replace import replace_clusters
from ort_accel.generated.worker import Outcome
from ort_accel.native.library import native_library
from tests.generated.cases import whole
from tests.generated.traced import Traced, normal

needs_compiler = pytest.mark.skipif(bool(why_no_code()), reason=why_no_code())
needs_library = pytest.mark.skipif(native_library() is None, reason="the native library was not built")


def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mm((x.sin() * y).softmax(-1), y.t()).cos() * 3


@dataclass
class Built:
    """A function's clusters as the background process compiles them, and one that it cannot."""

    traced: Traced
    clusters: dict[str, Cluster]
    library: bytes
    outcomes: dict[str, Outcome]
    sources: Path
    commands: list[list[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    sources, commands = tmp_path_factory.mktemp("sources") / "new folder", []

    class Started(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: object) -> None:
            commands.append(command)
            super().__init__(command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Started)
        traced = Traced(function, (normal(40, 24), normal(40, 24)), "symbolic")
        (unable,) = Traced(lambda x, y: torch.gcd(x * 2, y) * 3, (whole(8, 8), whole(8, 8))).all_clusters()
        found = {f"test_builds_{at}": cluster for at, cluster in enumerate([*traced.all_clusters(), unable])}
        library, outcomes = compile_parts(found, sources)
        yield Built(traced, found, library, outcomes, sources, commands)


@needs_compiler
def test_a_process_of_its_own_compiles_all_clusters(built: Built) -> None:
    assert built.library.startswith(b"\x7fELF")
    assert [bool(each.error) for each in built.outcomes.values()] == [False, False, True]
    assert [command[1:4] for command in built.commands] == [["-P", "-m", "ort_accel.generated.worker"]]
    assert not Path(built.commands[0][4]).exists(), "its folder is still there"


@needs_compiler
def test_the_sources_are_kept_where_that_is_asked_for(built: Built) -> None:
    names = list(built.clusters)
    assert {path.name for path in built.sources.iterdir()} == {f"{names[0]}.cpp", *(f"{name}.py" for name in names)}
    text = (built.sources / f"{names[0]}.cpp").read_text()
    assert [f"int64_t {name}(const Value* a)" in text for name in names] == [True, True, False]
    for name, cluster in built.clusters.items():
        assert (built.sources / f"{name}.py").read_text() == cluster.source


@needs_compiler
@needs_library
def test_sessions_call_the_kernels(built: Built) -> None:
    chosen = {name: [cluster] for name, cluster in built.clusters.items() if not built.outcomes[name].error}
    load_kernels(built.library, list(chosen))
    session = built.traced.session(replace_clusters(built.traced.segment, chosen))
    assert session.operators == ["test_builds_0", "AtenCall", "test_builds_1"]
    for rows, columns in [(40, 24), (7, 100), (3, 3)]:
        x, y = normal(rows, columns), normal(rows, columns) + 1
        torch.testing.assert_close(session(x, y), [function(x, y)], rtol=2e-5, atol=2e-5)


@needs_library
def test_no_library_is_loaded_for_no_kernels() -> None:
    load_kernels(b"no library", [])


@needs_library
def test_what_is_no_library_is_an_error() -> None:
    with pytest.raises(OSError, match=r"kernels\.so"):
        load_kernels(b"no library", ["test_builds_none"])


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is run in place of the process that compiles."""
    start, instead = subprocess.Popen, list[str]()
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(instead, **options))
    yield instead
    assert not builds._RUNNING, "a process is still there"


ONE = {"one": Cluster([], [], [])}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no room')", "the compiling process ended with 1: no room"),
        ("import os; os.kill(os.getpid(), 9)", "the compiling process ended with -9: no words"),
        ("print('done')", "the compiling process ended with 0: done"),
    ],
)
def test_a_process_that_ends_without_a_result_is_an_error(code: str, said: str, command: list[str]) -> None:
    command += [sys.executable, "-c", code]
    with pytest.raises(NoKernels, match=f"^{said}$"):
        compile_parts(ONE, None)


def test_a_process_that_takes_too_long_is_ended(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "MOST_SECONDS", 0.1)
    command += [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(NoKernels, match=r"took more than 0\.1 s"):
        compile_parts(ONE, None)


def test_processes_end_with_the_process_that_trains(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    builds._RUNNING.add(process)
    builds._end_processes()
    assert process.wait(60) == -9


@pytest.mark.parametrize(
    ("programs", "variable", "missing"),
    [
        (["g++"], "", False),
        (["clang++"], "", False),
        (["my-compiler"], "my-compiler", False),
        ([], "my-compiler", True),
        ([], "", True),
    ],
)
def test_what_is_missing_without_a_compiler(
    programs: list[str], variable: str, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", variable)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)
    assert why_no_code() == ("there is no C++ compiler; install g++" if missing else "")


def test_kernels_depend_on_torch_the_processor_and_the_code_that_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    version = builds.build_version.__wrapped__
    assert version() == version()
    assert torch.__version__ in version()
    before = version()
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        assert version() != before
    read = Path.read_bytes
    for name in ("clusters.py", "inductor.py", "worker.py"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path, name=name: read(path) + b"\n" * (path.name == name))
            assert version() != before


def test_the_process_has_the_compiler_that_was_found_and_sees_no_gpu(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor would look for g++ alone. On a GPU the process would take memory."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang++" else None)
    code = f"import os, pathlib; pathlib.Path({str(tmp_path / 'seen')!r}).write_text(repr(dict(os.environ)))"
    command += [sys.executable, "-c", code]
    with pytest.raises(NoKernels):
        compile_parts(ONE, None)
    seen = eval((tmp_path / "seen").read_text())
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["CXX"] == "/usr/bin/clang++"
    assert seen["PYTHONPATH"].split(os.pathsep)[0] == str(Path(builds.__file__).parents[2])
