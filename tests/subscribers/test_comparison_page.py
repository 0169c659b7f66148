"""The page of two runs: what the comparison found, module by module, and a plot with the divergence marked."""

import json
import math

import pytest
from typer.testing import CliRunner

from ort_accel.cli.main import app
from ort_accel.subscribers.comparison import Difference
from ort_accel.subscribers.comparison_page import comparison_page
from tests.observe.pages import read, table_with

MODULES = ["embed<ding>", "layers.0", "layers.1", ""]


def differences(worst=None, amount=0.5, steps=2):
    """Those of two runs, with one module of one direction and step that is apart."""
    places = [
        (step, direction, name)
        for step in range(steps)
        for direction, names in (("forward", MODULES), ("backward", MODULES[::-1]))
        for name in names
    ]
    return [
        Difference(*place, "Linear", 0, 0, amount if place == worst else 1e-6, "max 1 and 2", (2.0, 3.0))
        for place in places
    ]


def page_of(*args, **more):
    return read(comparison_page(("runs/a", "runs/<b>"), differences(*args, **more), 1e-3))


def test_modules_are_lined_up_with_the_worst_of_each_direction():
    rows = table_with(page_of((1, "backward", "layers.0")), "module", "kind", "forward")
    assert [row[0] for row in rows] == ["embed<ding>", "layers.0", "layers.1", "(model)"]
    assert rows[1] == ["layers.0", "Linear", "1e-06", "0", "0.5", "1", "max 1 and 2"]
    assert rows[2][2:6] == ["1e-06", "0", "1e-06", "0"]


def test_the_first_divergence_is_named_and_marked_in_the_plot_of_its_step():
    page = page_of((1, "forward", "layers.1"))
    assert "first divergence: step 1, forward, layers.1 (Linear): max 1 and 2" in page.text
    assert "Step 1, in the order of running" in page.headings
    plot = page.plots["The largest difference of each tensor"]
    assert "layers.1" in plot.words
    forward, backward = plot.points
    assert min(range(4), key=lambda place: forward[place][1]) == 2
    assert len({y for _, y in backward}) == 1


def test_the_page_says_that_equal_runs_agree():
    page = page_of()
    assert "16 tensors agree within 0.001" in page.text
    assert "0 of them differ by more" in page.text
    assert "What differs" not in page.headings
    assert "runs/a and runs/<b>" in page.text


def test_both_runs_are_drawn_by_the_size_of_their_values():
    plot = page_of().plots["The size of its values (root mean square) in both runs"]
    ours, theirs = plot.points
    assert len(ours) == len(theirs) == 8
    assert ours[0][1] > theirs[0][1]


def test_tensors_that_cannot_be_compared_stand_above_all_others():
    page = page_of((0, "forward", "layers.0"), amount=math.inf)
    forward, _ = page.plots["The largest difference of each tensor"].points
    assert min(range(4), key=lambda place: forward[place][1]) == 1
    assert "inf" in table_with(page, "module")[1]


def test_two_empty_runs_are_a_page():
    assert "0 tensors agree" in read(comparison_page(("a", "b"), [], 1e-3)).text


def test_many_differences_are_listed_to_a_limit():
    found = [
        Difference(step, "forward", f"layers.{step}", "Linear", 0, 0, 1.0, "max 1 and 2", (1.0, 1.0))
        for step in range(2_000)
    ]
    page = read(comparison_page(("a", "b"), found, 1e-3))
    assert "The first 500 of 2,000 tensors that differ" in page.text


def row(module, value):
    figures = dict.fromkeys(("min", "max", "mean", "std", "norm1", "norm2", "pattern"), value)
    place = {"step": 0, "direction": "forward", "module": module, "kind": "Linear", "tensor": 0, "call": 0}
    return json.dumps({**place, "dtype": "float32", "shape": [1], **figures, "nan": 0, "inf": 0})


@pytest.fixture
def runs(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "step-000000.jsonl").write_text(f"{row('same', 1.0)}\n{row('other', value)}\n")
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_the_command_writes_the_page_beside_its_table(runs, tmp_path):
    file = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["compare-stats", *runs, "--html", str(file)])
    assert result.exit_code == 1
    line = "first divergence: step 0, forward, other (Linear)"
    assert line in result.stdout
    assert line in read(file.read_text()).text


def test_a_page_that_cannot_be_written_is_exit_code_2(runs, tmp_path):
    result = CliRunner().invoke(app, ["compare-stats", *runs, "--html", str(tmp_path / "no" / "out.html")])
    assert result.exit_code == 2
    assert "out.html cannot be written: No such file" in result.stderr
