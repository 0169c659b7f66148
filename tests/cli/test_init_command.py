"""`ort-accel init`: questions and options that write two files, which accelerate and ort_accel read."""

import pytest
from accelerate.commands.config import load_config_from_file
from typer.testing import CliRunner

import ort_accel
from ort_accel.cli.accelerate_file import AccelerateFile
from ort_accel.cli.main import app
from ort_accel.cli.presets import Machine

RUNNER = CliRunner()


def init(*arguments, answers=None, code=0):
    done = RUNNER.invoke(app, ["init", *map(str, arguments)], input=answers)
    assert done.exit_code == code, (done.output, done.exception)
    return done


def written(folder, tmp_path):
    """What accelerate reads, and what we read."""
    file = AccelerateFile(str(folder / "accelerate.yaml"))
    assert file.has_section
    (tmp_path / "theirs").mkdir()
    return load_config_from_file(file.without_section(tmp_path / "theirs")), ort_accel.load_config(
        folder / "accelerate.yaml"
    )


@pytest.mark.parametrize("machine", list(Machine))
def test_without_questions_the_files_are_read_by_both(tmp_path, machine):
    done = init(tmp_path / "new", "--machine", machine, "--yes")
    theirs, ours = written(tmp_path / "new", tmp_path)
    assert theirs.num_processes == (1 if machine.is_single else 2)
    assert ours == ort_accel.load_config()
    assert f"ort-accel launch --config_file {tmp_path / 'new' / 'accelerate.yaml'} SCRIPT" in done.stdout


def test_answers_reach_the_files_and_wrong_ones_are_asked_again(tmp_path):
    done = init(tmp_path, answers="tpu\nDDP\nmany\n0\n3\nbf16\nerror\nout/cache\n")
    theirs, ours = written(tmp_path, tmp_path)
    assert (theirs.distributed_type.value, theirs.num_processes, theirs.mixed_precision) == ("MULTI_CPU", 3, "bf16")
    assert (ours.engine.fallback, str(ours.engine.cache_dir)) == ("error", "out/cache")
    assert "'tpu' is not one of single-cpu" in done.output
    assert done.output.count("is not a number from 1 on") == 2


def test_no_answer_takes_the_default(tmp_path):
    init(tmp_path, answers="\n\n\n\n")
    theirs, ours = written(tmp_path, tmp_path)
    assert (theirs.use_cpu, theirs.num_processes, theirs.mixed_precision) == (True, 1, "no")
    assert ours == ort_accel.load_config()


def test_an_option_answers_its_question(tmp_path):
    given = ["--machine", "ddp", "--processes", "4", "--fallback", "report", "--mixed-precision", "no"]
    done = init(tmp_path, *given, "--cache-dir", "", answers="")
    assert "?" not in done.output
    theirs, ours = written(tmp_path, tmp_path)
    assert (theirs.num_processes, ours.engine.fallback) == (4, "report")


def test_files_that_are_there_are_kept_unless_forced(tmp_path):
    (tmp_path / "ort_accel.yaml").write_text("mine")
    assert "there already" in init(tmp_path, "--yes", code=2).stderr
    assert (tmp_path / "ort_accel.yaml").read_text() == "mine"
    init(tmp_path, "--yes", "--force")
    assert (tmp_path / "ort_accel.yaml").read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "single-cpu", "--processes", "2"], "choose --machine ddp"),
        (["--machine", "moon"], "moon"),
        (["--cache-dir", "a\0b"], "engine.cache_dir"),
    ],
    ids=str,
)
def test_an_impossible_answer_writes_nothing(tmp_path, arguments, message):
    assert message in init(tmp_path / "new", "--yes", *arguments, code=2).output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("answers", ["", "ddp\n2\n"])
def test_an_input_that_ends_early_says_how_to_go_on_and_writes_nothing(tmp_path, answers):
    done = init(tmp_path / "new", answers=answers, code=2)
    assert "answer them by options (ort-accel init --help), or take the defaults with --yes" in done.stderr
    assert "Aborted" not in done.output
    assert not (tmp_path / "new").exists()
