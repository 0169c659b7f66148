"""Scripts that are launched for real: alone, in two processes, through each launcher; compared with plain PyTorch."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.test_utils import path_in_accelerate_package

import ort_accel
from ort_accel.hf import ORTAccelCallback
from tests.cli.scripts.with_trainer import train
from tests.ranks import PATHS
from tests.tiers import mostly_long

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
LOOP, TRAINER = str(SCRIPTS / "loop.py"), str(SCRIPTS / "with_trainer.py")
LAUNCH = ["-m", "ort_accel", "launch"]
FROM_TWO = {"rel": 1e-6, "abs": 1e-6}
"""Two halves of a sum are added in another order than the whole."""


def python(*arguments, code=0, **variables):
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "ORT_ACCEL_"))}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**keep, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def result(file):
    return json.loads(file.read_text())


def torchrun():
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]


def config_file(tmp_path, name, section=None):
    """A file of configs/accelerate on a port that is free."""
    keys = yaml.safe_load((ROOT / "configs" / "accelerate" / f"{name}.yaml").read_text())
    keys |= {"main_process_port": 0} | ({"ort_accel_config": section} if section else {})
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(keys))
    return file


@pytest.fixture(scope="module")
def eager_loop(tmp_path_factory):
    out = tmp_path_factory.mktemp("eager") / "eager.json"
    python(LOOP, out, ACCELERATE_USE_CPU="true")
    found = result(out)
    assert found["report"] is None
    return found


@pytest.fixture(scope="module")
def eager_trainer(tmp_path_factory):
    """What one process finds without the engine; its checkpoint lies beside."""
    out = tmp_path_factory.mktemp("eager") / "eager.json"
    python(TRAINER, out)
    return result(out) | {"checkpoint": checkpoint(out)}


def checkpoint(out):
    return out.parent / "out" / "checkpoint-2"


def test_an_untouched_script_runs_on_onnx_runtime_and_learns_the_same(tmp_path, eager_loop):
    out = tmp_path / "out.json"
    file = config_file(tmp_path, "single-cpu", {"compute": {"attention": "products"}})
    python(*LAUNCH, "--config_file", file, LOOP, out, "--lr", "1")
    found = result(out)
    assert found["losses"] == pytest.approx(eager_loop["losses"], abs=1e-6)
    assert found["keys"] == eager_loop["keys"]
    assert found["arguments"] == ["--lr", "1"]
    effects = {feature["name"]: feature["effect"] for feature in found["report"]["features"]}
    assert "matrix products and a softmax" in effects["compute.attention"], "the section was not read"


@pytest.mark.parametrize("launcher", mostly_long(["ort-accel launch", "torchrun"], "torchrun"))
def test_two_processes_on_the_cpu_train_as_one_with_one_pair_of_graphs(tmp_path, eager_loop, launcher):
    out = tmp_path / "out.json"
    if launcher == "torchrun":
        python(*torchrun(), "-m", "ort_accel.run", LOOP, out)
    else:
        python(*LAUNCH, "--config_file", config_file(tmp_path, "ddp"), LOOP, out)
    found = result(out)
    assert found["processes"] == 2
    assert found["losses"] == pytest.approx(eager_loop["losses"], **FROM_TWO)
    assert found["weight"] == pytest.approx(eager_loop["weight"], **FROM_TWO)
    assert found["report"]["counters"]["compilations"] == 2
    assert found["report"]["fallbacks"] == []


@pytest.mark.long
def test_zero_2_shares_gradients_around_one_pair_of_graphs(tmp_path, eager_loop):
    pytest.importorskip("deepspeed")
    out = tmp_path / "out.json"
    python(
        *LAUNCH, "--config_file", config_file(tmp_path, "deepspeed-zero2", {"engine": {"fallback": "error"}}), LOOP, out
    )
    found = result(out)
    assert found["losses"] == pytest.approx(eager_loop["losses"], **FROM_TWO)
    assert found["report"]["counters"]["compilations"] == 2


@pytest.mark.long
def test_zero_3_runs_layer_by_layer_on_one_pair_of_graphs(tmp_path, eager_loop):
    pytest.importorskip("deepspeed")
    out = tmp_path / "out.json"
    section = {"distributed": {"zero3": True}, "engine": {"fallback": "error"}}
    python(*LAUNCH, "--config_file", config_file(tmp_path, "deepspeed-zero3", section), LOOP, out)
    found = result(out)
    assert found["losses"] == pytest.approx(eager_loop["losses"], **FROM_TWO)
    effects = {feature["name"]: feature["effect"] for feature in found["report"]["features"]}
    assert effects["distributed.zero3"].startswith("3 layers (Linear) are gathered one by one")
    assert found["report"]["counters"]["compilations"] == 4, "the first layer's input needs no gradient"
    assert found["keys"] == eager_loop["keys"]


@pytest.fixture(scope="module")
def two_trainers(tmp_path_factory, eager_trainer):
    """What two processes find; they also go on from the checkpoint of the one, and leave their own."""
    out = tmp_path_factory.mktemp("two") / "out.json"
    config = out.with_name("ort_accel.yaml")
    config.write_text("engine: {compile_evaluation: true}")
    python(*torchrun(), "-m", "ort_accel.run", "--ort_config", config, TRAINER, out, eager_trainer["checkpoint"])
    return result(out) | {"checkpoint": checkpoint(out)}


@pytest.mark.long
def test_a_trainer_in_two_processes_trains_as_one_with_one_pair_of_graphs(eager_trainer, two_trainers):
    assert two_trainers["processes"] == 2
    assert two_trainers["losses"] == pytest.approx(eager_trainer["losses"], **FROM_TWO)
    assert two_trainers["report"]["counters"]["compilations"] == 3, "forward and backward; forward for evaluation"


@pytest.mark.long
def test_a_run_of_one_process_goes_on_in_two_and_of_two_in_one(tmp_path, eager_trainer, two_trainers):
    assert two_trainers["resumed"] == pytest.approx(eager_trainer["losses"][:3], **FROM_TWO)
    trainer, losses = train(tmp_path, str(two_trainers["checkpoint"]), callbacks=[ORTAccelCallback()])
    assert losses == pytest.approx(eager_trainer["losses"][:3], **FROM_TWO)
    assert ort_accel.report(trainer.model).counters["compilations"] == 2


@pytest.mark.long
def test_a_process_that_is_killed_ends_the_job_with_an_error(tmp_path):
    done = python(*LAUNCH, "--config_file", config_file(tmp_path, "ddp"), SCRIPTS / "dies.py", tmp_path, code=137)
    assert "exitcode  : -9" in done.stderr
    steps = {path.name for path in tmp_path.glob("[01] *")}
    assert steps == {"0 0", "0 1", "1 0", "1 1"}, "nobody goes on without the others"


@pytest.mark.long
def test_the_runner_works_as_a_module_of_accelerate_launch(tmp_path, eager_loop):
    out = tmp_path / "out.json"
    accelerate = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", 1, "--num_machines", 1]
    python(*accelerate, "-m", "ort_accel.run", LOOP, out)
    assert result(out)["losses"] == pytest.approx(eager_loop["losses"], abs=1e-6)
    assert result(out)["report"]["counters"]["compilations"] == 2


def test_accelerates_own_switch_for_compilers_names_this_engine(tmp_path, eager_loop):
    out = tmp_path / "out.json"
    keys = {"distributed_type": "NO", "use_cpu": True, "dynamo_config": {"dynamo_backend": "ONNXRT"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(keys))
    python("-m", "accelerate.commands.launch", "--config_file", tmp_path / "a.yaml", LOOP, out)
    found = result(out)
    assert found["losses"] == pytest.approx(eager_loop["losses"], abs=1e-6)
    assert found["keys"] == [f"_orig_mod.{key}" for key in eager_loop["keys"]]


@pytest.mark.long
def test_accelerates_own_scripts_pass(tmp_path):
    folder = path_in_accelerate_package("test_utils", "scripts")
    script = tmp_path / "all.py"
    script.write_text(
        "import runpy\n"
        "for name in ('test_script', 'test_sync', 'test_ops'):\n"
        f"    runpy.run_path('{folder}/' + name + '.py', run_name='__main__')\n"
    )
    done = python(*LAUNCH, "--cpu", script)
    assert re.search(r"ort_accel: \d+ % of the (captured )?work on ONNX Runtime", done.stderr), done.stderr
