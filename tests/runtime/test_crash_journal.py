"""A run that ONNX Runtime ended is remembered, and a model that ended two goes to PyTorch."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import ort_accel
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report
from ort_accel.runtime import crash_journal
from ort_accel.runtime.crash_journal import CrashedBefore, CrashJournal
from ort_accel.runtime.crash_page import detach_pages
from ort_accel.runtime.lock_files import FOREIGN_SECONDS, machine
from ort_accel.runtime.model_cache import ModelKeys
from ort_accel.runtime.session import Session
from tests.forked import START

KEYS = ModelKeys("context")


def train_once(folder):
    """Two steps of a small model; returns its report, and the last gradient beside that of eager PyTorch."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, values):
            return second(torch.cos(first(values))).sum()

    gradients = []
    model = Model()
    for _ in range(3):
        model(torch.ones(3, 8)).backward()
        gradients.append(first.weight.grad.clone())
        first.weight.grad = None
        ort_accel.accelerate(model, {"engine": {"cache_dir": str(folder), "compare_with_eager": False}})
    return ort_accel.report(model), gradients[0], gradients[-1]


def run_once(folder, dies_in, signal_number):
    """A process that trains, and dies when ONNX Runtime creates or runs a model with a Cos, or behind that."""
    original = Session.__init__, Session.__call__
    runs = []

    def create(self, model, *args, **kwargs):
        self.is_fatal = b"Cos" in model
        if self.is_fatal and dies_in == "created":
            die()
        original[0](self, model, *args, **kwargs)

    def call(self, feeds):
        runs.append(self)
        if self.is_fatal and dies_in == {1: "run", 2: "later run"}.get(runs.count(self)):
            die()
        return original[1](self, feeds)

    def die():
        if signal_number:
            os.kill(os.getpid(), signal_number)
        os._exit(3)

    Session.__init__, Session.__call__ = create, call
    torch.set_num_threads(1)
    report, expected, got = train_once(folder)
    torch.testing.assert_close(got, expected)
    if dies_in == "between":
        die()
    Path(folder, "report.json").write_text(json.dumps(report.to_dict()))


def run(folder, dies_in=None, signal_number=0):
    """Such a process; returns how it ended, and its report if it had one."""
    process = START.Process(target=run_once, args=(str(folder), dies_in, signal_number))
    process.start()
    process.join(120)
    file = folder / "report.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    return process.exitcode, report


def ended_runs(report):
    return {item["op"] for item in report["fallbacks"] if item["reason"] == Reason.ENDED_RUNS.value}


def of_ends(report):
    """The notes about runs that ended in ONNX Runtime, without what follows from them for kept graphs."""
    return [note for note in report["notes"] if "ended while" in note and not note.startswith("engine.cache_dir")]


@pytest.mark.parametrize(
    ("dies_in", "signal_number", "code", "left_to_pytorch"),
    [
        ("run", signal.SIGSEGV, -signal.SIGSEGV, {"aten.addmm.default", "aten.cos.default", "aten.sum.default"}),
        ("later run", signal.SIGABRT, -signal.SIGABRT, {"aten.addmm.default", "aten.cos.default", "aten.sum.default"}),
        ("created", 0, 3, {"aten.cos.default"}),
    ],
)
def test_after_two_crashes_pytorch_runs_the_model(tmp_path, dies_in, signal_number, code, left_to_pytorch):
    assert run(tmp_path, dies_in, signal_number)[0] == code
    assert run(tmp_path, dies_in, signal_number)[0] == code
    exit_code, report = run(tmp_path, dies_in, signal_number)
    assert exit_code == 0
    assert ended_runs(report) == left_to_pytorch
    assert any(segment["runner"] == "onnxruntime" for segment in report["segments"]), "all is left to PyTorch"
    (note,) = of_ends(report)
    assert "2 runs ended while ONNX Runtime created or ran it" in note
    shutil.rmtree(tmp_path / crash_journal.FOLDER)
    exit_code, report = run(tmp_path)
    assert (exit_code, report["fallbacks"], of_ends(report)) == (0, [], [])


@pytest.mark.parametrize("dies_in", ["run", "later run"])
def test_after_one_crash_a_model_is_tried_again_and_forgiven_on_success(tmp_path, dies_in):
    assert run(tmp_path, dies_in, signal.SIGKILL)[0] == -signal.SIGKILL
    exit_code, report = run(tmp_path)
    assert (exit_code, report["fallbacks"]) == (0, [])
    assert any("1 run ended" in note and "tried once more" in note for note in report["notes"])
    assert of_ends(run(tmp_path)[1]) == []
    assert marks(tmp_path) == []


def test_a_termination_signal_or_an_end_between_runs_is_no_crash(tmp_path):
    assert run(tmp_path, "later run", signal.SIGTERM)[0] == -signal.SIGTERM
    assert run(tmp_path, "between", signal.SIGKILL)[0] == -signal.SIGKILL
    assert len(marks(tmp_path)) == 1, "the page of the second"
    assert of_ends(run(tmp_path)[1]) == []
    assert marks(tmp_path) == []


def test_no_marker_stays_after_a_run_that_succeeded_or_raised(tmp_path):
    attempt = CrashJournal(tmp_path, KEYS, Report()).attempt(b"model", "part")
    with attempt.first_use():
        assert len(marks(tmp_path)) == 1
    with pytest.raises(RuntimeError), attempt.first_use():
        raise RuntimeError
    assert marks(tmp_path) == []


def test_the_marker_of_a_living_process_is_no_crash(tmp_path):
    report = Report()
    with CrashJournal(tmp_path, KEYS, report).attempt(b"model", "part").first_use():
        CrashJournal(tmp_path, KEYS, report).attempt(b"model", "part")
    assert report.notes == []


def test_processes_that_died_together_count_once(tmp_path):
    leave(tmp_path, 1, machine(), 11)
    leave(tmp_path, 1, machine(), 12)
    report = Report()
    CrashJournal(tmp_path, KEYS, report).attempt(b"model", "part").succeeded()
    assert len(report.notes) == 1
    assert marks(tmp_path) == []


def test_a_crash_in_one_model_does_not_affect_others(tmp_path):
    leave(tmp_path, 2, machine(), 11)
    report = Report()
    CrashJournal(tmp_path, KEYS, report).attempt(b"another model", "part")
    CrashJournal(tmp_path, ModelKeys("another onnxruntime"), report).attempt(b"model", "part")
    assert report.notes == []


def test_a_file_of_another_machine_counts_after_an_hour(tmp_path):
    path = leave(tmp_path, 2, "elsewhere", 11)
    report = Report()
    CrashJournal(tmp_path, KEYS, report).attempt(b"model", "part")
    assert report.notes == []
    hour_ago = time.time() - FOREIGN_SECONDS - 1
    os.utime(path, (hour_ago, hour_ago))
    with pytest.raises(CrashedBefore, match="2 runs ended"):
        CrashJournal(tmp_path, KEYS, report).attempt(b"model", "part")


def marks(folder):
    return sorted((folder / crash_journal.FOLDER).iterdir())


def leave(folder, number, machine, process):
    """What a process leaves that dies in its attempt of this number."""
    path = folder / crash_journal.FOLDER / f"{KEYS.of(b'model')}.{number}.{machine}.{process}"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    return path


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a small disk, or mounts it again with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("disks cannot be mounted here")
        return folder

    yield mount
    detach_pages()
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)
    assert not folder.is_mount()


@pytest.mark.parametrize("options", ["size=4k", "nr_inodes=2"], ids=["no room for a model", "no room for a file"])
def test_a_full_disk_is_reported_and_training_goes_on(disk, options):
    folder = disk(options)
    for _ in range(2):
        report, expected, got = train_once(folder)
        torch.testing.assert_close(got, expected)
        assert any("No space left on device; nothing is kept" in note for note in report.notes)
        assert report.fallbacks == []


def test_a_disk_that_can_only_be_read_serves_what_it_has(disk):
    folder = disk("size=4m")
    made = train_once(folder)[0].counters["cache misses"]
    detach_pages()
    disk("remount,ro")
    report, expected, got = train_once(folder)
    torch.testing.assert_close(got, expected)
    assert report.counters["cache hits"] == made > 0
    assert any("Read-only file system; should ONNX Runtime end a process" in note for note in report.notes)


def test_a_crash_counts_even_if_its_marker_cannot_be_written(disk):
    folder = disk("size=4m")
    leave(folder, 2, machine(), 11)
    later = KEYS.of(b"another model")
    (folder / crash_journal.FOLDER / f"running.{machine()}.12").write_bytes(f"{later}.2".encode().ljust(4096, b"\0"))
    disk("remount,ro")
    for model in (b"model", b"another model"):
        with pytest.raises(CrashedBefore):
            CrashJournal(folder, KEYS, Report()).attempt(model, "part")
