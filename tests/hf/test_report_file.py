"""`observe.report_file` in a Trainer: written when training ends, with a figure of every step, by whoever trains."""

import json
import logging

import pytest

from tests.hf.tiny import arguments, logged, make, reviewer, reviews, train
from tests.observe.pages import read, table_with
from tests.tiers import mostly_long

OFF = {"enabled": False}


def reported(file, **more):
    return {"observe": {"report_file": str(file)}, **more}


@pytest.mark.parametrize("side", ["callback", "ORTTrainer"])
def test_the_report_of_a_training_has_a_figure_of_every_step(side, tmp_path):
    file = tmp_path / "report.json"
    config = reported(file, engine=OFF)
    trainer = train(side, tmp_path, max_steps=6, logging_steps=4, config=config, train_dataset=reviews()[1::2])
    data = json.loads(file.read_text())
    for name in ("ort/step_time", "ort/tokens_per_s", "ort/density"):
        assert [point["step"] for point in data["series"][name]] == [1, 2, 3, 4, 5, 6]
    assert {point["mean"] for point in data["series"]["ort/density"]} == {0.5}
    told = [line["ort/step_time"] for line in logged(trainer)]
    times = [point["mean"] for point in data["series"]["ort/step_time"]]
    assert told[0] == pytest.approx(sum(times[:4]) / 4)


def test_a_page_shows_the_steps_and_what_the_engine_did(tmp_path):
    file = tmp_path / "report.html"
    train("callback", tmp_path, max_steps=3, config=reported(file))
    page = read(file.read_text())
    assert len(page.plots["Share of the tokens that are not padding"].points[0]) == 3
    assert "capture" in page.text
    assert table_with(page, "graph", "run by")


def test_steps_are_numbered_on_after_resuming(tmp_path):
    file = tmp_path / "report.json"
    config = reported(file, engine=OFF)
    train("callback", tmp_path, max_steps=2, save_strategy="steps", save_steps=2, config=config)
    train("callback", tmp_path, max_steps=4, resume=str(tmp_path / "checkpoint-2"), config=config)
    steps = [point["step"] for point in json.loads(file.read_text())["series"]["ort/step_time"]]
    assert steps == [3, 4]


def test_a_switched_off_engine_still_reports_its_steps(tmp_path):
    file = tmp_path / "report.json"
    train("callback", tmp_path, max_steps=2, config=reported(file, engine=OFF))
    data = json.loads(file.read_text())
    assert len(data["series"]["ort/step_time"]) == 2
    assert data["features"] == [{"name": "engine", "state": "off", "reason": "engine.enabled is false", "effect": ""}]


@pytest.mark.parametrize("engine", mostly_long([True, False], False))
def test_a_file_that_cannot_be_written_does_not_stop_the_training(tmp_path, caplog, engine):
    caplog.set_level(logging.WARNING, "ort_accel")
    (tmp_path / "file").touch()
    config = reported(tmp_path / "file" / "report.html", engine={"enabled": engine})
    trainer = train("callback", tmp_path / "out", max_steps=2, config=config)
    assert trainer.state.global_step == 2
    assert len([message for message in caplog.messages if "observe.report_file" in message]) == 1


def test_a_second_training_has_a_report_of_its_own_steps(tmp_path):
    file = tmp_path / "report.json"
    trainer = make("ORTTrainer", reviewer(), arguments(tmp_path, max_steps=2), reported(file, engine=OFF))
    for _ in range(2):
        trainer.train()
        data = json.loads(file.read_text())
        assert [point["step"] for point in data["series"]["ort/step_time"]] == [1, 2]
