"""The README's chart shows the newest files of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.draw_chart import CASES, IMAGES, MACHINE, README, RESULTS, THEMES, caption, chart, newest

COMMAND = "run `python benchmarks/draw_chart.py`"


@pytest.mark.parametrize("theme", THEMES)
def test_the_chart_is_that_of_the_newest_files(theme: str) -> None:
    assert (IMAGES / f"steps-{theme}.svg").read_text(encoding="utf-8") == chart(newest(RESULTS), theme), COMMAND


def test_the_readme_names_the_machine_and_the_days() -> None:
    assert caption(newest(RESULTS)) in README.read_text(encoding="utf-8"), COMMAND


def test_a_newer_run_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    written(tmp_path, "2026-11-27-step-bert-x.json", ours=1.0)
    written(tmp_path, "2026-11-27-step-bert-fourth-x.json", ours=2.0)
    written(tmp_path, "2026-11-27-step-bert-second-x.json", ours=3.0)
    case = CASES[4]
    assert newest(tmp_path)[case].seconds["ort_accel"] == 2.0
    written(tmp_path, "2026-11-28-step-bert-x.json", ours=4.0)
    assert newest(tmp_path)[case].seconds["ort_accel"] == 4.0


def test_runs_of_other_machines_and_runs_with_a_wrong_contender_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, "2026-11-27-step-bert-x.json", ours=1.0)
    written(tmp_path, "2026-11-28-step-bert-x.json", ours=2.0, machine={"cpu_family": "25", "cpu_model": "1"})
    written(tmp_path, "2026-11-28-step-bert-second-x.json", ours=3.0, wrong={"ort_accel": "another loss"})
    assert [run.seconds["ort_accel"] for run in newest(tmp_path).values()] == [1.0]


def written(folder: Path, name: str, ours: float, **changed: Any) -> None:
    """A file of `step.py` for a dense BERT."""
    seconds = {"eager": {"median": 1.0}, "inductor": {"median": 1.0}, "ort_accel": {"median": ours}}
    workload = {"model": "bert", "density": 1.0, "labelled": None, "dropout": 0.0, "precision": "fp32"}
    content = {
        "machine": {"cpu_family": MACHINE[1], "cpu_model": MACHINE[2]},
        "workload": workload | {"checkpointing": False},
        "seconds": seconds,
        "ratios": {},
        "fresh_process": {},
        "wrong": {},
    }
    (folder / name).write_text(json.dumps(content | changed), encoding="utf-8")
