"""The bounds benchmark: what kernels take is part of a step, and bounds how fast it can get."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bounds import CASES, Bound, Name
from benchmarks.density import CASES as DENSITY_CASES

ROOT = Path(__file__).parents[2]


def test_its_cases_are_those_of_the_density_benchmark() -> None:
    for name in ("classification", "causal", "mlm"):
        ours, theirs = CASES[Name(name)], next(case for key, case in DENSITY_CASES.items() if key.value == name)
        assert (ours.workload, ours.asked) == (theirs.workload, theirs.faster)


@pytest.mark.parametrize(
    ("ours", "verdict"), [(0.5, "met"), (0.9, "open")], ids=["as fast as asked", "slower than the kernels allow"]
)
def test_a_ratio_within_the_bound_is_met_or_open(ours: float, verdict: str) -> None:
    bound = Bound(eager=1.0, ours=ours, products=0.3, attention=0.1, asked=2.0)
    assert bound.most == pytest.approx(2.5)
    assert bound.verdict == verdict


def test_a_ratio_above_the_bound_is_out_of_reach() -> None:
    assert Bound(eager=1.0, ours=0.9, products=0.5, attention=0.1, asked=2.0).verdict == "out of reach"


def test_the_kernels_of_a_step_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "bounds.json"
    command = ["benchmarks/bounds.py", "--tiny", "--case", "bert", "--steps", "2", "--warmup", "1", "--json", str(file)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["bert"]
    assert found["products"] > 0
    assert found["attention"] > 0
    assert found["most"] == pytest.approx(found["eager"] / (found["products"] + found["attention"]))
