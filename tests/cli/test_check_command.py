"""`check` says all that is wrong, line by line, and its exit code says whether anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ort_accel.cli.main import app
from ort_accel.config import load_config
from ort_accel.errors import ConfigError

BAD = 'engine:\n  opset: "[bold]17[/bold]"\n  cach_dir: x\nmemory:\n  level: 9\n'
runner = CliRunner()


@pytest.fixture
def files(tmp_path):
    (tmp_path / "good.yaml").write_text("version: 1\n")
    (tmp_path / "bad.yaml").write_text(BAD)
    return tmp_path


def test_a_good_file_is_named_and_exits_with_0(files):
    result = runner.invoke(app, ["check", str(files / "good.yaml")])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{files / 'good.yaml'}: ok\n", "")


def test_each_problem_is_one_line_exactly_as_the_error_says(files):
    with pytest.raises(ConfigError) as caught:
        load_config(files / "bad.yaml")
    result = runner.invoke(app, ["check", str(files / "bad.yaml")])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [str(problem) for problem in caught.value.problems]
    assert len(caught.value.problems) == 3
    assert "[bold]" in result.stderr


def test_all_files_are_checked_even_after_a_bad_one(files):
    result = runner.invoke(app, ["check", str(files / "bad.yaml"), str(files / "none.yaml"), str(files / "good.yaml")])
    assert result.exit_code == 2
    assert "none.yaml" in result.stderr
    assert "good.yaml: ok" in result.stdout


def test_standard_input_is_checked_too():
    assert runner.invoke(app, ["check", "-"], input="version: 1\n").stdout == "-: ok\n"
    bad = runner.invoke(app, ["check", "-"], input=BAD)
    assert bad.exit_code == 2
    assert all(line.startswith("<stdin>:") for line in bad.stderr.splitlines())


def test_json_holds_the_same_for_machines(files):
    result = runner.invoke(app, ["check", "--json", str(files / "good.yaml"), str(files / "bad.yaml")])
    good, bad = json.loads(result.stdout)
    assert result.exit_code == 2
    assert result.stderr == ""
    assert good == {"file": str(files / "good.yaml"), "ok": True, "problems": []}
    assert not bad["ok"]
    assert {"line": 5, "column": 10, "path": "memory.level"}.items() <= bad["problems"][-1].items()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"\x00" * 100, b"a: &a [*a]", b"\t", b"- 1"])
def test_no_content_makes_a_traceback(files, content):
    (files / "odd.yaml").write_bytes(content)
    result = runner.invoke(app, ["check", str(files / "odd.yaml")])
    assert result.exit_code in (0, 2)
    assert isinstance(result.exception, SystemExit | None)


def test_what_migrate_prints_is_good():
    pipe = f"{sys.executable} -m ort_accel migrate | {sys.executable} -m ort_accel check -"
    variables = {
        "ORTMODULE_MEMORY_OPT_LEVEL": "1",
        "ORTMODULE_PRINT_INPUT_DENSITY": "1",
        "ORTMODULE_CACHE_DIR": "cache",
    }
    done = subprocess.run(
        pipe, shell=True, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "-: ok\n")
