"""The benchmark of trainers: the same losses from all contenders, and figures of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_trainer_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "trainers.json"
    command = ["benchmarks/trainers.py", "--tiny", "--case", "sft", "--rounds", "2", "--json", str(file)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["cases"]["sft"]
    assert set(found["seconds"]) == {"eager", "ort_accel"}
    assert found["ratios"]["eager"]["ratio"] > 0
    assert "of the rows count" in found["rows"]
    assert "sft" in done.stdout
