"""The cache saves time where it can and is never in the way."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
import torch

import ort_accel
from ort_accel.reporting.report import Report, State
from ort_accel.runtime import model_cache as cache_module
from ort_accel.runtime.model_cache import ModelCache, ModelKeys

HOUSE = Path(__file__).parents[2]


def train_once(**engine):
    """One step of a small model; returns its report and a gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    ort_accel.accelerate(model, {"version": 1, "engine": engine})
    model(torch.ones(3, 8)).sum().backward()
    return ort_accel.report(model), model[0].weight.grad


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.model"))


def test_the_second_start_finds_every_model(tmp_path):
    first, expected = train_once(cache_dir=str(tmp_path))
    second, got = train_once(cache_dir=str(tmp_path))
    assert first.counters["cache misses"] == len(entries(tmp_path)) > 0
    assert second.counters["cache misses"] == 0
    assert second.counters["cache hits"] == len(entries(tmp_path))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[: len(content) // 2], lambda content: b"", lambda content: b"\x00" * len(content)],
    ids=["truncated", "empty", "foreign"],
)
def test_a_damaged_file_is_reported_and_made_again(tmp_path, damage):
    _, expected = train_once(cache_dir=str(tmp_path))
    whole = {path: path.read_bytes() for path in entries(tmp_path)}
    for path, content in whole.items():
        path.write_bytes(damage(content))
    report, got = train_once(cache_dir=str(tmp_path))
    assert sum("damaged" in note for note in report.notes) == len(whole)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert {path: path.read_bytes() for path in entries(tmp_path)} == whole


def test_one_flipped_bit_is_found(tmp_path):
    cache = ModelCache(tmp_path, ModelKeys("context"), Report())
    cache.put(b"model", b"optimized model")
    (path,) = entries(tmp_path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert cache.get(b"model") is None


def test_another_context_is_another_entry(tmp_path):
    ModelCache(tmp_path, ModelKeys("onnxruntime 1.19.2"), Report()).put(b"model", b"optimized")
    assert ModelCache(tmp_path, ModelKeys("onnxruntime 1.19.2"), Report()).get(b"model") == b"optimized"
    assert ModelCache(tmp_path, ModelKeys("onnxruntime 1.31.1"), Report()).get(b"model") is None


def test_a_folder_that_cannot_be_written_costs_only_a_note(tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("in the way of the folder")
    report, grad = train_once(cache_dir=str(blocked))
    assert any("cannot" in note and str(blocked) in note for note in report.notes)
    assert grad is not None


def test_a_full_disk_costs_only_a_note(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module, "write_aside", full)
    report, grad = train_once(cache_dir=str(tmp_path))
    assert any("No space left on device" in note for note in report.notes)
    assert grad is not None


def test_an_unwritable_cache_folder_is_reported_as_refused_with_one_warning(tmp_path, monkeypatch, caplog):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert train_once(cache_dir=str(tmp_path))[0].features["engine.cache_dir"].state is State.APPLIED
    for path in entries(tmp_path):
        path.unlink()
    monkeypatch.setattr(cache_module, "write_aside", full)
    report, _ = train_once(cache_dir=str(tmp_path))
    found = report.features["engine.cache_dir"]
    assert (found.state, "No space left on device" in found.reason) == (State.REFUSED, True)
    assert len([record for record in caplog.records if "No space left on device" in record.getMessage()]) == 1


def write_many(folder: str, seed: int) -> None:
    cache = ModelCache(Path(folder), ModelKeys("context"), Report())
    for number in range(200):
        cache.put(b"model %d" % (number % 5), b"%d" % (number % 5) * 10_000)
        body = cache.get(b"model %d" % ((number + seed) % 5))
        assert body is None or body == b"%d" % ((number + seed) % 5) * 10_000


def test_processes_may_share_the_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write_many, args=(str(tmp_path), seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(entries(tmp_path)) == 5


def test_a_process_killed_while_writing_leaves_a_usable_cache(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ort_accel.reporting.report import Report\n"
        "from ort_accel.runtime.model_cache import ModelCache, ModelKeys\n"
        f"cache = ModelCache(Path({str(tmp_path)!r}), ModelKeys('context'), Report())\n"
        "while True:\n    cache.put(b'model', b'x' * 5_000_000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=HOUSE)
    deadline = time.monotonic() + 60
    while not entries(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    report = Report()
    assert ModelCache(tmp_path, ModelKeys("context"), report).get(b"model") == b"x" * 5_000_000
    assert report.notes == []


def test_saved_models_are_valid_onnx_under_readable_names(tmp_path):
    train_once(save_onnx=str(tmp_path), onnx_prefix="tiny")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        f"tiny_{graph}_0_part_0.{kind}.onnx" for graph in ("backward", "forward") for kind in ("lowered", "optimized")
    ]
    for name in names:
        onnx.checker.check_model(str(tmp_path / name))


def test_an_unwritable_folder_for_models_is_an_error_before_training(tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    with pytest.raises(ort_accel.OrtAccelError, match=r"engine\.save_onnx: cannot write to .*a file"):
        train_once(save_onnx=str(blocked))


def test_old_half_written_files_are_deleted(tmp_path):
    old, fresh = tmp_path / ".a.model.0123", tmp_path / ".b.model.4567"
    for path in (old, fresh):
        path.write_bytes(b"half of a mod")
    before = time.time() - cache_module.UNFINISHED_SECONDS - 1
    os.utime(old, (before, before))
    report = Report()
    ModelCache(tmp_path, ModelKeys("context"), report)
    assert list(tmp_path.iterdir()) == [fresh]
    assert report.notes == ["engine.cache_dir: deleted half-written files of earlier runs: 1"]
