"""The benchmark refuses to time what is wrong, and what it writes can be relied on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ort_accel.cli.bench import ModelName
from ort_accel.cli.benchmark import contenders
from ort_accel.cli.benchmark.contenders import Judge
from ort_accel.cli.benchmark.timing import compare, in_turns, summary
from ort_accel.cli.benchmark.workload import MODELS, Workload, batch_of, build
from ort_accel.cli.main import app

ROOT = Path(__file__).parents[2]
TINY = ["--hidden", "16", "--layers", "1", "--heads", "2", "--batch", "2", "--length", "9", "--vocab", "40"]
TINY += ["--steps", "3", "--warmup", "1", "--threads", "1"]
runner = CliRunner()


def tiny(model="bert", **more):
    return Workload(model, hidden=16, layers=1, heads=2, batch=2, length=9, vocab=40, **more)


@pytest.mark.long
def test_the_script_writes_everything_it_measured(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/step.py", *TINY, "--contender", "eager", "--contender", "ort_accel"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["workload"] == vars(tiny())
    assert set(found["seconds"]) == set(found["fresh_process"]) == {"eager", "ort_accel"}
    for times in found["seconds"].values():
        assert len(times["all"]) == 3
        assert 0 < times["min"] <= times["lower_quartile"] <= times["median"] <= times["upper_quartile"]
    eager, ours = (found["seconds"][name]["median"] for name in ("eager", "ort_accel"))
    assert found["ratios"] == {"eager": found["ratios"]["eager"]}
    assert found["ratios"]["eager"]["ratio"] == pytest.approx(eager / ours)
    for figures in found["fresh_process"].values():
        assert figures["cold_seconds"] > 0
        for most in ("first_step_mib", "in_use_mib"):
            assert figures[most] is None or figures[most] > 0
    assert {"cpu", "cpu_family", "cores", "load_before", "load_after", "torch", "onnxruntime"} <= set(found["machine"])
    assert all(speed > 0.1 for speed in found["machine"]["matmul_gflops"].values())
    assert found["gflop"] == sum(segment["flops"] for segment in found["report"]["segments"]) / 1e9 > 0
    assert 0.5 < found["ort_share"] <= 1
    assert "ort_accel" in done.stdout
    assert not done.stderr


def test_json_can_go_to_standard_output():
    result = runner.invoke(app, ["bench", *TINY, "--contender", "ort_accel", "--no-fresh", "--json", "-"])
    assert result.exit_code == 0
    assert set(json.loads(result.stdout)["seconds"]) == {"ort_accel"}


def test_a_wrong_contender_gets_no_figures_and_exit_code_1(monkeypatch):
    prepare = contenders.prepare

    def spoiled(name, model, config):
        prepare(name, model, config)
        if name == "ort_accel":
            model.classifier.weight.register_hook(lambda gradient: gradient * 1.01)

    monkeypatch.setattr(contenders, "prepare", spoiled)
    result = runner.invoke(app, ["bench", *TINY, "--contender", "eager", "--contender", "ort_accel", "--no-fresh"])
    assert result.exit_code == 1
    assert "ort_accel: wrong, so it has no figures: the gradient of classifier.weight is off by 0.01" in result.stdout
    assert "\nort_accel  " not in result.stdout
    assert "\neager " in result.stdout


def test_inductor_without_a_compiler_is_said_and_the_others_go_on(monkeypatch):
    def missing(self):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch.nn.Module, "compile", missing)
    result = runner.invoke(app, ["bench", *TINY, "--no-fresh", "--json", "-"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert "No working C++ compiler" in found["absent"]["inductor"]
    assert set(found["seconds"]) == {"eager", "ort_accel"}


@pytest.mark.parametrize(
    "wrong", [["--heads", "3"], ["--model", "no"], ["--steps", "0"], ["--kv-heads", "3"], ["--config", "/no/file.yaml"]]
)
def test_what_cannot_be_measured_is_exit_code_2(wrong):
    assert runner.invoke(app, ["bench", *TINY, *wrong]).exit_code == 2


def test_every_model_of_the_command_can_be_built():
    assert set(MODELS) == set(ModelName)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_model_is_judged_right_in_eager(name, precision):
    workload = tiny(name, dropout=0.1, precision=precision)
    model, batch = build(workload), batch_of(workload)
    assert Judge(model, batch, precision).fault(model) == ""


def test_the_judge_sees_a_lost_gradient_and_a_nan():
    workload = tiny()
    model, batch = build(workload), batch_of(workload)
    judge = Judge(model, batch, "fp32")
    hook = model.classifier.bias.register_hook(lambda gradient: gradient * float("nan"))
    assert "classifier.bias is off by nan" in judge.fault(model)
    hook.remove()
    model.classifier.bias.requires_grad_(False)
    assert "classifier.bias is off by inf" in judge.fault(model)


def test_the_judge_takes_what_either_of_two_steps_in_eager_mode_gave():
    workload = tiny()
    model, batch = build(workload), batch_of(workload)
    factors = iter([1.0, 2.0, 1.0, 2.0, 3.0])
    model.classifier.bias.register_hook(lambda gradient: gradient * next(factors))
    judge = Judge(model, batch, "fp32")
    assert [judge.fault(model) == "" for _ in range(3)] == [True, True, False]


def test_contenders_take_turns_and_no_one_is_always_first():
    order = []
    seconds = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, warmup=1)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [len(values) for values in seconds.values()] == [3, 3]


def test_the_ratio_lies_within_its_interval_and_slow_rounds_do_not_move_it():
    fast = [1.0, 1.1, 1.0, 5.0, 1.05]
    ratio = compare([2 * value for value in fast], fast)
    assert ratio.ratio == pytest.approx(2)
    assert ratio.low <= ratio.ratio <= ratio.high
    assert summary([3.0]).median == 3.0


def test_a_model_with_gradient_checkpointing_computes_its_layers_again():
    size = Workload("bert", hidden=8, layers=1, heads=2, batch=2, length=4, vocab=20, checkpointing=True)
    model = build(size)
    assert model.is_gradient_checkpointing
    assert str(size).endswith("gradient checkpointing")
