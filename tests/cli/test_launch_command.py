"""`ort-accel launch`: whatever is wrong is said with its place and exit code 2, before any process is started."""

import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.commands.config.config_args import ClusterConfig
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

import ort_accel
from ort_accel import run
from ort_accel.cli import launching
from ort_accel.cli.main import app
from ort_accel.cli.presets import Machine, accelerate_config

ROOT = Path(__file__).parents[2]
LAUNCHER = CliRunner()
SINGLE = {"distributed_type": "NO", "use_cpu": True}


@pytest.fixture
def started(monkeypatch):
    """Stands in for accelerate's launcher: the arguments and configurations with which it would start processes."""
    calls = []

    def launch_command(args):
        config = load_config_from_file(args.config_file) if args.config_file else None
        calls.append((args, config))

    monkeypatch.setattr(launching, "launch_command", launch_command)
    monkeypatch.setattr(launching, "default_config_file", "/nowhere/default_config.yaml")
    for variable in ("ACCELERATE_USE_CPU", "OMP_NUM_THREADS", "GLIBC_TUNABLES"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return calls


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("")
    return str(file)


def launch(*arguments, code=0):
    done = LAUNCHER.invoke(app, ["launch", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def write(folder, text, name="accelerate.yaml"):
    file = folder / name
    file.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return str(file)


def test_the_runner_stands_in_front_of_the_script_and_its_arguments(started, script, tmp_path):
    file = write(tmp_path, {**SINGLE, "ort_accel_config": {"engine": {"threads": 2}}})
    launch("--config_file", file, "--mixed-precision", "bf16", script, "--lr", "1", "--help")
    ((args, config),) = started
    assert (args.module, args.training_script) == (True, "ort_accel.run")
    assert args.training_script_args == ["--ort_config", file, script, "--lr", "1", "--help"]
    assert args.mixed_precision == "bf16"
    assert isinstance(config, ClusterConfig), "accelerate refuses the section, so it must not see it"


def test_a_file_on_the_command_line_goes_before_the_section(started, script, tmp_path):
    ours = write(tmp_path, "engine: {threads: 3}", "ours.yaml")
    launch("--config_file", write(tmp_path, {**SINGLE, "ort_accel_config": {}}), "--ort-config", ours, script)
    assert started[0][0].training_script_args == ["--ort_config", ours, script]


def test_a_module_is_launched_as_one(started):
    launch("--cpu", "-m", "json.tool", "x")
    assert started[0][0].training_script_args == ["-m", "json.tool", "x"]


@pytest.mark.parametrize("how", ["options", "file"])
def test_processes_on_cpus_are_started_without_mpi(started, script, tmp_path, how, monkeypatch):
    monkeypatch.setattr(launching.torch, "get_num_threads", lambda: 8)
    file = write(tmp_path, accelerate_config(Machine.DDP, 2, "no"))
    launch(*(["--cpu", "--num_processes", 2] if how == "options" else ["--config_file", file]), script)
    args = started[0][0]
    assert (args.cpu, args.multi_gpu, args.num_processes) == (False, True, 2)
    assert launching.os.environ["ACCELERATE_USE_CPU"] == "true"
    assert launching.os.environ["OMP_NUM_THREADS"] == "4"


def test_one_process_on_the_cpu_has_all_threads(started, script, monkeypatch):
    monkeypatch.setattr(launching.torch, "get_num_threads", lambda: 8)
    launch("--cpu", script)
    assert not started[0][0].multi_gpu
    assert launching.os.environ["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(
    ("before", "gaps", "after"),
    [
        (None, True, "glibc.malloc.tcache_count=0"),
        ("glibc.malloc.perturb=1", True, "glibc.malloc.perturb=1:glibc.malloc.tcache_count=0"),
        ("glibc.malloc.tcache_count=3", True, "glibc.malloc.tcache_count=3"),
        (None, False, None),
    ],
)
def test_glibc_is_told_to_leave_no_gaps_where_it_would(started, script, monkeypatch, before, gaps, after):
    monkeypatch.setattr(launching, "fragments_heap", lambda: gaps)
    if before is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", before)
    launch("--cpu", script)
    assert launching.os.environ.get("GLIBC_TUNABLES") == after


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script is named; usage: ort-accel launch [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]"),
        (["--num_processes", "two", "train.py"], "--num-processes: invalid int value: 'two'; usage: ort-accel launch"),
        (["trian.py"], "trian.py: no such script; did you mean train.py?"),
        (["nowhere/train.py"], "nowhere/train.py: no such script; the folder 'nowhere' is not there either"),
        (["-m", "no_such_package.train"], "no_such_package.train: no such module"),
        (["--no_python", "train.py"], "--no_python runs a program that is not Python"),
        (["--dynamo_backend", "inductor", "train.py"], "--dynamo_backend inductor: a model has one compiler"),
        (["--tpu", "train.py"], "--tpu: no ONNX Runtime trains there"),
        (
            ["--config_file", "acelerate.yaml", "train.py"],
            "acelerate.yaml: no such file; did you mean accelerate.yaml?",
        ),
        (["--ort_config", "no.yaml", "train.py"], "no.yaml: no such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_wrong_command_is_said_in_a_line(started, script, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SINGLE)
    done = launch(*arguments, code=2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not started


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("use_cpu: true\nort_acel_config: {}\n", ":2:1: ort_acel_config: unknown key; did you mean ort_accel_config?"),
        ("ort_accel_config:\n  engine:\n    enable: 1\n", ":3:5: ort_accel_config.engine.enable: unknown key; did you"),
        ("ort_accel_config:\n  engine: {threads: x}\n", ":2:21: ort_accel_config.engine.threads: the text 'x' is not"),
        ("ort_accel_config: ours.yml\n", ":1:19: ort_accel_config: 'ours.yml': no such file; did you mean"),
        ("ort_accel_config: [1]\n", ":1:19: ort_accel_config: a map of ort_accel's keys belongs here"),
        (
            "use_cpu: true\ndynamo_config:\n  dynamo_backend: INDUCTOR\n",
            ":3:19: dynamo_config.dynamo_backend: INDUCTOR",
        ),
        (
            "distributed_type: XLA\n",
            ":1:19: distributed_type: XLA: no ONNX Runtime trains there; allowed: NO, MULTI_CPU",
        ),
        ("distributed_type: NO\n", ":1:19: distributed_type: accelerate reads NO without quotes as false"),
        ("compute_environment: AMAZON_SAGEMAKER\n", ":1:22: compute_environment: AMAZON_SAGEMAKER"),
        ("- a\n", ":1:1: keys and values belong here"),
        ("use_cpu: true\n  debug: false\n", ":2:8: no `:` can stand here"),
        ("", ":1:1: the file is empty"),
    ],
    ids=lambda value: value.strip()[:40],
)
def test_a_wrong_file_is_said_with_its_place(started, script, tmp_path, text, message):
    write(tmp_path, "version: 1", "ours.yaml")
    file = write(tmp_path, text)
    assert f"{file}{message}" in launch("--config_file", file, script, code=2).stderr
    assert not started


def test_mistakes_of_both_parts_are_said_at_once(started, script, tmp_path):
    file = write(tmp_path, "use_cpus: true\nort_accel_config: {memori: {}}\n")
    lines = launch("--config_file", file, script, code=2).stderr.splitlines()
    assert [line.removeprefix(file).split(": unknown")[0] for line in lines] == [
        ":1:1: use_cpus",
        ":2:20: ort_accel_config.memori",
    ]


def test_a_section_may_name_a_file_and_its_mistakes_have_their_own_place(started, script, tmp_path):
    (tmp_path / "below").mkdir()
    file = write(tmp_path, "use_cpu: true\nort_accel_config: below/ours.yaml\n")
    ours = write(tmp_path / "below", "engine: {threads: 2}\n", "ours.yaml")
    assert ort_accel.load_config(file).engine.threads == 2
    write(tmp_path / "below", "engine: {threads: 0}\n", "ours.yaml")
    assert f"{ours}:1:19: engine.threads: 0 is out of range" in launch("--config_file", file, script, code=2).stderr


def test_check_reads_the_section_too(tmp_path):
    file = write(tmp_path, "use_cpu: true\nort_accel_config: {memory: {lvl: 1}}\n")
    done = LAUNCHER.invoke(app, ["check", file])
    assert done.exit_code == 2
    assert f"{file}:2:29: ort_accel_config.memory.lvl: unknown key" in done.stderr


def test_a_section_that_names_its_own_file_is_an_error_and_not_a_circle(tmp_path):
    file = write(tmp_path, "ort_accel_config: accelerate.yaml\n")
    with pytest.raises(ort_accel.ConfigError, match="ort_accel_config: unknown key"):
        ort_accel.load_config(file)


def test_help_has_examples_and_accelerates_options():
    text = launch("--help").stdout
    assert "ort-accel launch --cpu train.py --epochs 3" in text
    assert all(f"--{option}" in text for option in ("ort_config", "num_processes", "mixed_precision", "use_deepspeed"))


def test_the_exit_code_is_that_of_the_first_script_that_failed(script, monkeypatch):
    def fail_with(error):
        def launch_command(_):
            raise error

        monkeypatch.setattr(launching, "launch_command", launch_command)

    fail_with(subprocess.CalledProcessError(7, ["python"]))
    launch("--cpu", script, code=7)
    fail_with(subprocess.CalledProcessError(-9, ["python"]))
    launch("--cpu", script, code=137)
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=5, error_file="none")
    fail_with(ChildFailedError("train", {1: failure}))
    launch("--cpu", script, code=5)
    fail_with(ValueError("You need to use at least 2 processes to use `--multi_gpu`."))
    assert "at least 2 processes" in launch("--cpu", script, code=2).stderr


def test_accelerates_default_file_counts_where_no_other_is_named(started, script, tmp_path, monkeypatch):
    file = write(tmp_path, {**SINGLE, "num_processes": 1, "ort_accel_config": {"engine": {"threads": 2}}})
    monkeypatch.setattr(launching, "default_config_file", file)
    launch(script)
    launch("--cpu", script)
    assert started[0][0].training_script_args[:2] == ["--ort_config", file]
    assert started[1][0].training_script_args == [script]


class TestTheRunner:
    """`python -m ort_accel.run`."""

    def test_a_script_that_is_not_there(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            run.run(["nowhere.py"])
        assert "ort_accel.run: nowhere.py: no such script in " in capsys.readouterr().err

    def test_a_configuration_that_is_wrong(self, script, tmp_path, capsys):
        with pytest.raises(SystemExit, match="2"):
            run.run(["--ort_config", write(tmp_path, "memori: {}"), script])
        assert ":1:1: memori: unknown key; did you mean memory?" in capsys.readouterr().err

    def test_fsdp_on_cpus_which_accelerate_would_leave_out_silently(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
        with pytest.raises(ort_accel.OrtAccelError, match="with FSDP on GPUs only"):
            run._set_up_cpu_processes()


@pytest.mark.parametrize("machine", list(Machine))
def test_each_file_in_configs_is_loaded_by_accelerate_and_by_us(started, script, machine):
    file = ROOT / "configs" / "accelerate" / f"{machine}.yaml"
    launch("--config_file", file, script)
    ((_, config),) = started
    assert config.num_processes == (1 if machine.is_single else 2)
    assert ort_accel.load_config(file) == ort_accel.load_config()
    keys = yaml.safe_load(file.read_text())
    del keys["ort_accel_config"]
    assert keys == accelerate_config(machine, config.num_processes, "no"), "`ort-accel init` writes something else"


def test_every_file_in_configs_is_a_machine():
    assert {file.stem for file in (ROOT / "configs" / "accelerate").iterdir()} == set(Machine)
