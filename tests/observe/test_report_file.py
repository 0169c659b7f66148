"""A report is written whole, by the first process, and never stands in the way of a training."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.observe.report_file import ReportFile, save_report
from ort_accel.reporting.report import Report, State
from tests.observe.pages import read

ROOT = Path(__file__).parents[2]
KEY = "observe.report_file"


def trained(**sections):
    model = ort_accel.accelerate(nn.Linear(3, 2), sections)
    model(torch.randn(4, 3)).sum().backward()
    return model


def test_a_model_s_report_is_saved_on_demand_for_machines_and_for_people(tmp_path):
    model = trained()
    ort_accel.save_report(model, tmp_path / "new" / "report.json")
    ort_accel.save_report(model, tmp_path / "new" / "report.html")
    data = json.loads((tmp_path / "new" / "report.json").read_text())
    assert data == json.loads(json.dumps(ort_accel.report(model).to_dict()))
    assert data["config"]["engine"]["enabled"] is True
    page = read((tmp_path / "new" / "report.html").read_text())
    assert "100 % in ONNX Runtime" in page.text
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(OrtAccelError, match=r"'.*report.pdf' ends in neither \.json .* nor \.html"):
        save_report(Report(), tmp_path / "report.pdf")


def blocked(folder):
    """A path that nobody can write to, not even root."""
    (folder / "file").write_text("in the way of the folder")
    return folder / "file" / "report.html"


def test_saving_where_nobody_can_write_is_an_error_that_names_the_file(tmp_path):
    file = blocked(tmp_path)
    with pytest.raises(OrtAccelError, match=rf"cannot be written to {file}: .*name a file where you may write"):
        save_report(Report(), file)


def test_an_unwritable_file_is_reported_once_before_training_which_goes_on(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ort_accel")
    model = trained(observe={"report_file": str(blocked(tmp_path))})
    said = [message for message in caplog.messages if KEY in message]
    assert len(said) == 1
    file = model._compiled_call_impl.backend.report_file
    file.write()
    file.write()
    assert [message for message in caplog.messages if KEY in message] == said
    assert ort_accel.report(model).features[KEY].state is State.REFUSED
    assert model.weight.grad is not None


def test_a_file_that_is_replaced_by_a_broken_one_stays_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "report.html"
    file.write_text("before")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OrtAccelError, match="No space left"):
        save_report(Report(), file)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("rank", "written"), [("0", True), ("1", False)])
def test_only_the_first_process_writes(tmp_path, monkeypatch, rank, written):
    monkeypatch.setenv("RANK", rank)
    file = ReportFile(Report(), tmp_path / "folder" / "report.json")
    file.write()
    assert (tmp_path / "folder" / "report.json").exists() is written
    assert (tmp_path / "folder").exists() is written


LOOP = """
import sys, torch, ort_accel
config = {"engine": {"compare_with_eager": False}, "observe": {"report_file": sys.argv[1]}}
model = ort_accel.accelerate(torch.nn.Linear(3, 2), config)
if sys.argv[2] == "train":
    model(torch.randn(4, 3)).sum().backward()
"""


@pytest.mark.parametrize("does", ["train", "nothing"])
def test_in_a_loop_of_ones_own_the_report_is_written_when_the_program_ends(tmp_path, does):
    file = tmp_path / "report.json"
    command = [sys.executable, "-c", LOOP, str(file), does]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert file.exists() is (does == "train")
    if does == "train":
        assert {segment["graph"] for segment in json.loads(file.read_text())["segments"]} == {"forward 0", "backward 0"}


def test_the_feature_says_where_the_report_goes(tmp_path):
    feature = ort_accel.report(trained(observe={"report_file": str(tmp_path / "r.json")})).features[KEY]
    assert feature.state is State.APPLIED
    assert str(tmp_path / "r.json") in feature.effect
