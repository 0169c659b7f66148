"""The classification example, as a user runs it, at a small size."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "hf" / "run_classification.py"
SMALL = [
    "--max_train_samples=24",
    "--max_eval_samples=8",
    "--max_seq_length=16",
    "--per_device_train_batch_size=8",
    "--max_steps=3",
]


@pytest.fixture
def texts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import texts

    return texts


def run(tmp_path, *arguments):
    command = [sys.executable, str(SCRIPT), f"--output_dir={tmp_path / 'out'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def rows(output):
    """The measured values by row label; every cell must hold a number."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line[:1] == "│"]
    return {label: [float(re.sub("[,%]", "", value)) for value in values] for label, *values in cells[:7]}


def test_comparing_prints_what_was_measured(tmp_path):
    done = run(tmp_path, "--compare_eager", *SMALL)
    assert done.returncode == 0, done.stderr
    assert re.search(r"forward +\d+ of \d+", done.stdout)
    table = rows(done.stdout)
    assert {len(values) for values in table.values()} == {2}
    assert table["train loss, last logged"][0] == pytest.approx(table["train loss, last logged"][1], abs=1e-3)
    accuracy = table.pop("held-out accuracy")
    assert all(0 <= value <= 100 and value % 12.5 == 0 for value in accuracy), "8 reviews are told in eighths"
    assert len(table) == 6
    assert all(value > 0 for values in table.values() for value in values)


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
