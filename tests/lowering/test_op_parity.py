"""torch's own samples of its operators give eager's results and gradients through the backend.

All operators with a lowering of their own, and some of the others. `benchmarks/op_sweep.py` takes all.
"""

from __future__ import annotations

import pytest
from torch.testing._internal.opinfo.core import OpInfo

from benchmarks.op_parity import Verdict, check, full_name, operators
from ort_accel.lowering.registry import lowerings
from tests.tiers import mostly_long

LOWERED = {target.__name__.split(".")[0].strip("_") for target in lowerings()}
"""Names of the ATen operators that have a lowering: `softmax` for `aten._softmax.default`."""


def has_lowering(op: OpInfo) -> bool:
    return op.aten_name.strip("_") in LOWERED or op.name.rpartition(".")[2] in LOWERED


WITH_LOWERING = [op for op in operators() if has_lowering(op)]
OTHERS = [op for op in operators() if not has_lowering(op)][::5]


@pytest.mark.parametrize("op", WITH_LOWERING, ids=full_name)
def test_an_operator_with_a_lowering_equals_eager(op: OpInfo) -> None:
    outcome = check(op)
    assert outcome.verdict is Verdict.MATCH, outcome.detail


@pytest.mark.parametrize("op", mostly_long(OTHERS, *OTHERS[::4]), ids=full_name)
def test_any_other_operator_equals_eager(op: OpInfo) -> None:
    outcome = check(op)
    assert outcome.verdict in {Verdict.MATCH, Verdict.SAME_FAULT}, outcome.detail


def test_onnxruntime_runs_what_has_a_lowering() -> None:
    for op in operators():
        if full_name(op) in {
            "add",
            "nn.functional.gelu",
            "softmax",
            "nn.functional.layer_norm",
            "var",
            "amax",
            "where",
        }:
            outcome = check(op)
            assert outcome.by_ort, full_name(op)
            assert not outcome.by_pytorch, f"{full_name(op)}: {outcome.reasons}"
