"""What all commands have in common."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ort_accel.cli.main import app

COMMANDS = ["check", "schema", "env", "migrate", "init", "launch"]
runner = CliRunner()


def run(*arguments: str, **options):
    return subprocess.run(
        [sys.executable, "-m", "ort_accel", *arguments], capture_output=True, text=True, timeout=120, **options
    )


def test_help_lists_every_command():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(f"\n  {command} " in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_examples_as_they_are_typed(command):
    text = runner.invoke(app, [command, "--help"]).stdout
    assert f"Examples:\n    ort-accel {command}" in text


@pytest.mark.parametrize("arguments", [["nothing"], ["check"], ["env", "--loud"], ["migrate", "surplus"]])
def test_a_mistake_on_the_command_line_exits_with_2(arguments):
    assert runner.invoke(app, arguments).exit_code == 2


def test_no_summary_of_a_command_is_cut_off():
    listed = runner.invoke(app, ["--help"]).stdout.partition("Commands:")[2]
    assert "..." not in listed
    assert all(line.rstrip().endswith(".") for line in listed.splitlines() if line.strip())


def completed(words):
    """What a shell is told to offer for the last of these words."""
    variables = {"_ORT_ACCEL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    return run(env={**os.environ, **variables}).stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ort-accel la", {"launch"}),
        ("ort-accel explain --pn", {"--png"}),
        ("ort-accel bench --model lla", {"llama"}),
        ("ort-accel init --machine ddp --fallback e", {"error"}),
    ],
)
def test_shells_complete_commands_options_and_choices(words, offered):
    assert set(completed(words)) == offered


def test_the_script_for_a_shell_is_about_the_command():
    shown = run(env={**os.environ, "_ORT_ACCEL_COMPLETE": "source_bash"})  # --show-completion asks what shell this is
    assert "complete -o default -F _ort_accel_completion ort-accel" in shown.stdout


def test_bench_refuses_a_file_that_it_could_not_write_before_it_measures(tmp_path, monkeypatch):
    monkeypatch.setattr("ort_accel.cli.bench._show", lambda *_: pytest.fail("it measured"))
    result = runner.invoke(app, ["bench", "--json", str(tmp_path)])
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_help_imports_no_engine():
    code = (
        "import sys\nfrom ort_accel.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'onnxruntime', 'onnx', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_the_module_is_the_command():
    assert run("--version").stdout == runner.invoke(app, ["--version"]).stdout


@pytest.mark.parametrize("command", ["schema", "env"])
def test_a_reader_that_leaves_early_sees_no_traceback(command):
    process = subprocess.Popen(
        [sys.executable, "-m", "ort_accel", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    said = process.stderr.read().splitlines()
    assert [line for line in said if "No CUDA runtime is found" not in line] == []  # a build for CUDA says so
    process.wait(timeout=120)


def test_no_colours_are_written_to_a_pipe():
    result = run("check", "nowhere.yaml", env={**os.environ, "NO_COLOR": "1"})
    assert "\x1b" not in result.stdout + result.stderr
