"""The check for CUDA devices, tried on the CPU: what is right is found right, and what is wrong is a finding."""

import json

import pytest
import torch

from benchmarks import on_cuda
from benchmarks.on_cuda import Bench, check_operators, everything_moved, fault_of, main, offload_fault
from ort_accel.capture import backend
from ort_accel.lowering import islands
from ort_accel.recompute import moves
from ort_accel.runtime.host_memory import HostMemory
from ort_accel.runtime.place import Place
from tests.tiers import mostly_long


@pytest.fixture
def bench():
    return Bench(torch.device("cpu"), tiny=True)


@pytest.mark.long
def test_a_model_with_padding_and_dropout_is_eagers(bench):
    size = bench.workload("bert", layers=1, density=0.5, dropout=0.2)
    assert fault_of(bench, size, "fp32", density={"padding": True}) == ""


def test_a_model_that_differs_is_a_fault(bench, monkeypatch):
    monkeypatch.setattr(on_cuda, "FP32", 0.0)
    assert "is off by" in fault_of(bench, bench.workload("bert", layers=1), "fp32")


@pytest.mark.parametrize("is_lost", mostly_long([False, True], True))
def test_values_that_are_moved_come_back_or_are_a_fault(bench, monkeypatch, is_lost):
    monkeypatch.setattr(backend, "place_for", lambda *_: Place(torch_memory=True))
    monkeypatch.setattr(moves, "LEAST_BYTES", 1)
    monkeypatch.setattr(islands, "MOST_ELEMENTS", 0)
    if is_lost:
        monkeypatch.setattr(HostMemory, "fetch", lambda _, kept: torch.zeros_like(kept))
    with everything_moved():
        fault = offload_fault(bench, bench.workload("bert", layers=1, dropout=0.1), "1TiB")
    assert ("other bits in" in fault) is is_lost, fault
    assert "moved" in bench.figures["memory.offload, budget 1TiB"]


def test_operators_are_compared_in_each_type(bench):
    check_operators(bench, "fp32")
    assert len(bench.findings) == 4
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


@pytest.mark.parametrize("is_right", [True, False])
def test_all_findings_are_written_down_and_decide_the_exit_code(is_right, tmp_path, capsys, monkeypatch):
    path = tmp_path / "found.json"
    monkeypatch.setattr(on_cuda, "check_operators", lambda *_: None)
    monkeypatch.setattr(on_cuda, "check_models", lambda bench: bench.looked("a model", lambda: "" if is_right else "x"))
    code = main(["--device", "cpu", "--tiny", "--rounds", "0", "--json", str(path)])
    assert code == (0 if is_right else 1)
    assert [finding["is_right"] for finding in json.loads(path.read_text())["findings"]] == [is_right]
    assert "eager's" in capsys.readouterr().out
