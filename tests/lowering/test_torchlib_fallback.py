"""What torchlib writes equals eager, and what it uses of other packages' private parts is still as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ort_accel.lowering import torchlib_fallback
from ort_accel.lowering.registry import lowerings
from tests.lowering.through_ort import Lowered, assert_like_eager

LOCK = Path(__file__).parents[2] / ".ci" / "requirements.lock"
LIST = json.loads(torchlib_fallback.LIST.read_text())
aten = torch.ops.aten

VECTOR = torch.arange(7, dtype=torch.float32).sin()
MATRIX = torch.arange(5 * 7, dtype=torch.float32).view(5, 7).cos()
PICTURE = torch.arange(2 * 3 * 5 * 4, dtype=torch.float32).view(2, 3, 5, 4).sin()

CALLS: dict[str, tuple[Any, ...]] = {
    "aten.addr.default": (lambda m, v: aten.addr(m, v[:5], v, beta=2.0, alpha=0.5), MATRIX, VECTOR),
    "aten.reflection_pad1d.default": (lambda m: aten.reflection_pad1d(m, [2, 3]), MATRIX),
    "aten.replication_pad1d.default": (lambda m: aten.replication_pad1d(m, [2, 3]), MATRIX),
    "aten.unfold.default": (lambda m: aten.unfold(m, 1, 3, 2), MATRIX),
    "aten.upsample_bicubic2d.default": (lambda p: aten.upsample_bicubic2d(p, [9, 7], True), PICTURE),
}


def test_every_operator_of_the_list_is_tested_here():
    assert set(CALLS) == set(LIST["operators"])


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_eager(name):
    function, *inputs = CALLS[name]
    assert_like_eager(function, *inputs)
    assert_like_eager(function, *(item.double() for item in inputs), ort="bicubic" not in name)


@pytest.mark.parametrize("name", CALLS)
def test_nan_and_infinity_come_out_as_in_eager(name):
    function, *inputs = CALLS[name]
    odd = [item.clone() for item in inputs]
    for item in odd:
        item.view(-1)[1], item.view(-1)[4], item.view(-1)[-1] = torch.nan, torch.inf, -torch.inf
    assert_like_eager(function, *odd)


@pytest.mark.parametrize("name", CALLS)
def test_sizes_that_change_give_eagers_result_or_are_left_to_pytorch(name):
    function, *inputs = CALLS[name]
    assert_like_eager(function, *inputs, ort=False, dynamic=True)


def test_a_type_that_was_not_compared_is_left_to_pytorch():
    lowered = Lowered(lambda m: aten.replication_pad1d(m, [1, 1]), [MATRIX.to(torch.bfloat16)])
    assert "in bfloat16" in lowered.refusals["aten.replication_pad1d.default"]


def test_no_operator_of_the_list_has_a_lowering_of_ours():
    for name in LIST["operators"]:
        assert lowerings()[torchlib_fallback.overload(name)].__module__ == torchlib_fallback.__name__


def test_finding_the_lowerings_does_not_import_torchlib():
    code = """
import sys
from ort_accel.lowering.registry import lowerings
lowerings()
sys.exit("onnxscript.function_libs.torch_lib.ops" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_list_was_made_with_the_locked_versions():
    pins = dict(line.strip().split("==") for line in LOCK.read_text().splitlines() if "==" in line)
    found = {name: pins[name].split(".")[:2] for name in ("torch", "onnxscript")}
    listed = {name: LIST[name].split("+")[0].split(".")[:2] for name in found}
    assert found == listed, "run `python -m benchmarks.torchlib_tail` on both runtimes, the second time with --narrow"


def test_the_registry_of_torchlib_is_as_assumed():
    functions = torchlib_fallback.torchlib()
    assert set(LIST["operators"]) <= set(functions), "default_registry no longer maps names to objects with .overloads"
    assert all(map(callable, functions.values()))


def test_the_recorder_is_as_assumed():
    from onnxscript import evaluator, values
    from torch.onnx._internal.exporter import _building, _tensors

    opset = values.Opset("", torchlib_fallback.OLDEST_OPSET)
    recorder = _building.OpRecorder(opset, {})
    value = _tensors.SymbolicTensor(opset, name="x")
    with evaluator.default_as(recorder):
        result = opset.Neg(value) + value
    assert [node.op_type for node in recorder.nodes] == ["Neg", "Add"], "OpRecorder no longer records what is called"
    assert result.producer() is recorder.nodes[-1], "SymbolicTensor no longer stands for the output of a node"
    assert recorder.nodes[0].inputs == (value,), "nodes no longer keep the values that they were given"
    assert recorder.functions == {}, "OpRecorder no longer keeps functions apart"
