"""The bounds benchmark: what kernels take is part of a step, and bounds how fast it can get."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_kernels_of_a_step_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "bounds.json"
    command = ["benchmarks/bounds.py", "--tiny", "--case", "bert", "--steps", "2", "--warmup", "1", "--json", str(file)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["bert"]
    assert found["products"] > 0
    assert found["attention"] > 0
    assert found["kernels"] == found["products"] + found["attention"]
