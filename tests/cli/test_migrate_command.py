"""`migrate` prints YAML, or errors that say where they are."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from ort_accel.cli.main import app
from ort_accel.config.load import load_config_text

runner = CliRunner()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ORTMODULE_")]:
        monkeypatch.delenv(name)


def test_the_environment_is_migrated(monkeypatch):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "cache")
    result = runner.invoke(app, ["migrate"])
    assert result.exit_code == 0
    assert str(load_config_text(result.stdout).engine.cache_dir) == "cache"


def test_an_env_file_stands_in_place_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "cache")
    file = tmp_path / "train.env"
    file.write_text("export ORTMODULE_MEMORY_OPT_LEVEL=2\n")
    config = load_config_text(runner.invoke(app, ["migrate", "--env-file", str(file)]).stdout)
    assert (config.engine.cache_dir, config.memory.level) == (None, 2)


def test_a_memory_config_stands_in_place_of_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "/nowhere.json")
    plans = tmp_path / "plans.json"
    plans.write_text('["BiasGelu+:1:-1"]')
    result = runner.invoke(app, ["migrate", "--memory-config", str(plans)])
    assert load_config_text(result.stdout).memory.plans == ("BiasGelu+:1:-1",)


def test_errors_go_to_standard_error_with_exit_code_2(monkeypatch):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "7")
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "on")
    result = runner.invoke(app, ["migrate"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line.split(":")[1] for line in result.stderr.splitlines()] == [
        " ORTMODULE_USE_TRITON",
        " ORTMODULE_MEMORY_OPT_LEVEL",
    ]


def test_a_bad_line_of_an_env_file_is_located(tmp_path):
    file = tmp_path / "train.env"
    file.write_text("A=1\nnot an assignment\n")
    result = runner.invoke(app, ["migrate", "--env-file", str(file)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{file}:2:1: ")
