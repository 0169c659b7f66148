"""The classification example, as a user runs it, at a small size."""

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from ort_accel.reporting.segments import Kernels
from tests.examples.figures import figures
from tests.observe.pages import read

SCRIPT = Path(__file__).parents[2] / "examples" / "hf" / "run_classification.py"
SMALL = [
    "--max_train_samples=24",
    "--max_eval_samples=8",
    "--max_seq_length=16",
    "--per_device_train_batch_size=8",
    "--max_steps=3",
]


@pytest.fixture
def live(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import live

    return live


@pytest.fixture
def texts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import texts

    return texts


def run(tmp_path, *arguments):
    command = [sys.executable, str(SCRIPT), f"--output_dir={tmp_path / 'out'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_comparing_shows_progress_figures_and_kernels_and_writes_the_page(tmp_path):
    done = run(tmp_path, "--compare_eager", *SMALL)
    assert done.returncode == 0, done.stderr
    for name in ("eager PyTorch", "ort_accel"):
        assert re.search(rf"^{name}: step 1 of 3, [\d,]+ tokens/s, \d+ s$", done.stdout, re.MULTILINE)
        assert re.search(rf"^{name}: 3 steps, loss [\d.]+, \d+ s$", done.stdout, re.MULTILINE)
    assert "ort_accel: set-up: capture" in done.stdout
    assert "eager PyTorch: set-up" not in done.stdout
    table = figures(done.stdout)
    assert len(table) == 8
    assert table["train loss, last logged"][0] == pytest.approx(table["train loss, last logged"][1], abs=1e-3)
    accuracy = table.pop("held-out accuracy")
    assert all(0 <= value <= 100 and value % 12.5 == 0 for value in accuracy), "8 reviews are told in eighths"
    set_up = table.pop("of this, set-up, s")
    assert 0 == set_up[0] < set_up[1] < table["time of training, s"][1]
    assert all(value > 0 for values in table.values() for value in values)
    for kernels in Kernels:
        assert kernels in done.stdout
    page = read((tmp_path / "out" / "report.html").read_text())
    assert len(page.plots["Seconds of each step"].points) == 2


def test_on_a_terminal_a_line_moves(tmp_path, live):
    console = Console(force_terminal=True, file=io.StringIO(), width=100)
    shown = live.LiveTraining("eager PyTorch", console)
    state = SimpleNamespace(num_input_tokens_seen=0, global_step=1, max_steps=2)
    shown.on_train_begin()
    shown.begin("capture", "forward 0")
    for state.global_step in (1, 2):
        shown.on_step_begin(None, state)
        state.num_input_tokens_seen += 50
        shown.on_step_end(None, state)
    shown.on_log(logs={"loss": 0.5})
    shown.on_train_end(None, state)
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", console.file.getvalue())
    assert "step 2 of 2" in lines
    assert "set-up" not in lines, "ort_accel shows it"
    assert re.search(r"eager PyTorch: 2 steps, loss 0.500, \d+ s\n$", lines)


def test_a_wrong_file_is_refused_with_its_places_before_training(tmp_path):
    (tmp_path / "wrong.yaml").write_text("engine:\n  enable: true\nmemry: {}\n")
    done = run(tmp_path, "--compare_eager", "--ort_config=wrong.yaml", *SMALL)
    assert done.returncode == 2
    assert [line.split(": ")[:2] for line in done.stderr.splitlines()[-2:]] == [
        ["wrong.yaml:2:3", "engine.enable"],
        ["wrong.yaml:3:1", "memry"],
    ]
    assert "Traceback" not in done.stderr
    assert "train" not in done.stdout


def test_the_reviews_are_what_they_are_said_to_be(texts):
    reviews = texts.film_reviews()
    assert len({review.text for review in reviews}) == 200
    assert sum(review.label for review in reviews) == 100


@pytest.mark.parametrize("seed", range(5))
def test_held_out_reviews_are_balanced_and_never_trained_on(texts, seed):
    reviews = texts.film_reviews()
    train, held_out = texts.split(reviews, held_out=0.3, seed=seed)
    assert (len(train), len(held_out)) == (140, 60)
    assert sum(review.label for review in held_out) == 30
    assert not {review.text for review in train} & {review.text for review in held_out}
    assert texts.split(reviews, held_out=0.3, seed=seed) == (train, held_out)
    assert texts.split(reviews, held_out=0.3, seed=seed + 1) != (train, held_out)
