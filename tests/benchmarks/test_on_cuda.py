"""The check for CUDA devices, tried on the CPU: what is right is found right, and what is wrong is a finding."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cuda_checks, on_cuda
from benchmarks.cuda_bench import Bench
from benchmarks.cuda_checks import Check, check_operator, fault_of
from benchmarks.cuda_offload import everything_moved, offload_fault
from benchmarks.on_cuda import main
from ort_accel.compiler import settings
from ort_accel.partition import placement
from ort_accel.recompute import offload
from ort_accel.runtime.device import ExecutionDevice
from ort_accel.runtime.host_memory import HostMemory
from tests.tiers import mostly_long


@pytest.fixture
def bench():
    return Bench(torch.device("cpu"), tiny=True)


@pytest.mark.long
def test_a_model_with_padding_and_dropout_is_eagers(bench):
    size = bench.workload("bert", layers=1, density=0.5, dropout=0.2)
    assert fault_of(bench, size, "fp32", density={"padding": True}) == ""


def test_a_model_that_differs_is_a_fault(bench, monkeypatch):
    monkeypatch.setattr(cuda_checks, "FP32", 0.0)
    assert "is off by" in fault_of(bench, bench.workload("bert", layers=1), "fp32")


@pytest.mark.parametrize("is_lost", mostly_long([False, True], True))
def test_values_that_are_moved_come_back_or_are_a_fault(bench, monkeypatch, is_lost):
    monkeypatch.setattr(settings, "place_for", lambda *_: ExecutionDevice(torch_memory=True))
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    monkeypatch.setattr(placement, "MIN_HANDOVER_ELEMENTS", 0)
    if is_lost:
        monkeypatch.setattr(HostMemory, "fetch", lambda _, kept: torch.zeros_like(kept))
    with everything_moved():
        fault = offload_fault(bench, bench.workload("bert", layers=1, dropout=0.1), "1TiB")
    assert ("other bits in" in fault) is is_lost, fault
    assert "moved" in bench.figures["memory.offload, budget 1TiB"]


def test_operators_are_compared_in_each_type(bench):
    for precision in ("fp32", "bf16"):
        check_operator(bench, "add", precision)
    assert [finding.name for finding in bench.findings] == ["operator add, fp32", "operator add, bf16"]
    assert all(finding.is_right for finding in bench.findings), bench.findings


def test_what_differs_or_fails_is_a_finding(bench):
    bench.looked("a difference", lambda: "off by 2")
    bench.looked("a failure", lambda: 1 / 0)
    bench.looked("nothing", str)
    assert [(finding.is_right, finding.detail[:17]) for finding in bench.findings] == [
        (False, "off by 2"),
        (False, "ZeroDivisionError"),
        (True, ""),
    ]


def in_this_process(command, **_):
    return SimpleNamespace(returncode=main(command[2:]))


@pytest.fixture
def one_check(monkeypatch):
    """Replaces all checks by one, in the process of the test."""

    def replace(run):
        monkeypatch.setattr(on_cuda, "checks", lambda _: [Check("a check", run), Check("another", lambda _: None)])
        monkeypatch.setattr(
            on_cuda.subprocess, "run", lambda command, **_: SimpleNamespace(returncode=main(command[2:]))
        )

    return replace


def on_cpu(path, *more):
    return main(["--device", "cpu", "--tiny", "--rounds", "0", "--out", str(path), *more])


@pytest.mark.parametrize("is_right", [True, False])
def test_all_findings_are_written_down_and_decide_the_exit_code(is_right, one_check, tmp_path, capsys):
    one_check(lambda bench: bench.looked("a check", lambda: "" if is_right else "x"))
    assert on_cpu(tmp_path / "found.json") == (0 if is_right else 1)
    record = json.loads((tmp_path / "found.json").read_text())
    assert [finding["is_right"] for finding in record["findings"]] == [is_right]
    assert record["ended"] == ["a check", "another"]
    assert "eager's" in capsys.readouterr().out


def test_without_time_no_check_begins_and_the_file_is_valid(one_check, tmp_path):
    one_check(lambda bench: bench.looked("a check", str))
    assert on_cpu(tmp_path / "found.json", "--budget", "0") == 0
    assert json.loads((tmp_path / "found.json").read_text())["ended"] == []


def test_a_check_that_ends_its_process_is_a_finding_and_the_next_one_runs(monkeypatch, tmp_path):
    path, ran = tmp_path / "found.json", []

    def process(command, **_):
        ran.append(command)
        if len(ran) == 1:
            record = on_cuda._begun(path)
            on_cuda._write(path, {**record, "under_way": "a check"})  # as a killed process leaves it
            return SimpleNamespace(returncode=-9)
        return SimpleNamespace(returncode=main(command[2:]))

    monkeypatch.setattr(on_cuda, "checks", lambda _: [Check("a check", None), Check("another", lambda _: None)])
    monkeypatch.setattr(on_cuda.subprocess, "run", process)
    assert on_cpu(path) == 1
    record = json.loads(path.read_text())
    assert record["ended"] == ["a check", "another"]
    assert "process ended" in record["findings"][0]["detail"]


def test_a_device_that_is_unusable_gets_a_new_process(monkeypatch, tmp_path):
    path, codes = tmp_path / "found.json", []

    def process(command, **_):
        codes.append(main(command[2:]))
        return SimpleNamespace(returncode=codes[-1])

    def fail(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(on_cuda, "checks", lambda _: [Check("a check", fail), Check("another", lambda _: None)])
    monkeypatch.setattr(on_cuda.subprocess, "run", process)
    assert on_cpu(path) == 1
    assert codes == [on_cuda.GO_ON, on_cuda.DONE]
    assert json.loads(path.read_text())["ended"] == ["a check", "another"]


def test_a_run_that_goes_on_repeats_only_what_was_wrong(one_check, tmp_path):
    path, ran = tmp_path / "found.json", []
    one_check(lambda bench: bench.looked("a check", lambda: "x"))
    assert on_cpu(path) == 1
    one_check(lambda bench: (ran.append(1), bench.looked("a check", str)))
    assert on_cpu(path, "--resume") == 0
    assert on_cpu(path, "--resume") == 0
    assert len(ran) == 1
