"""`env` says what is there, what it can do and what is missing, whatever state the machine is in."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re

import pytest
from typer.testing import CliRunner

from ort_accel.cli import environment
from ort_accel.cli.main import app
from ort_accel.runtime import installed_ort, ort_distributions

real_version = importlib.metadata.version
runner = CliRunner()


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that packages have these versions; None for one that is not installed."""

    def set_versions(versions: dict[str, str | None]) -> None:
        def version(name: str) -> str:
            found = versions[name] if name in versions else real_version(name)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return set_versions


def test_a_working_machine_can_train():
    result = runner.invoke(app, ["env"])
    assert result.exit_code == 0
    assert result.stdout.endswith("Training can run here.\n")
    for name in ("torch", "transformers", "accelerate", "onnx", "onnx-ir", "onnxscript", "deepspeed", "ort-accel"):
        assert f"\n{name} " in result.stdout


def test_json_holds_the_same_for_machines():
    found = json.loads(runner.invoke(app, ["env", "--json"]).stdout)
    assert found["can_train"] is True
    assert found["runtime"]["flavor"]["distribution"] == installed_ort.installed_runtime().distribution
    assert found["runtime"]["kernels"]["fused"]["com.microsoft.FusedMatMul"] is True
    assert found["devices"]["cpu_threads"] >= 1


def test_a_missing_runtime_is_said_with_its_command(pretend):
    pretend(dict.fromkeys(ort_distributions.DISTRIBUTIONS))
    result = runner.invoke(app, ["env"])
    assert result.exit_code == 1
    assert re.search(r'^  pip install "onnxruntime[^"]*"$', result.stdout, re.MULTILINE)
    assert result.stdout.endswith("Training cannot run here.\n")


def test_a_doubled_runtime_is_said_with_its_command(pretend):
    pretend(
        {**dict.fromkeys(ort_distributions.DISTRIBUTIONS), "onnxruntime": "1.31.1", "onnxruntime-training": "1.19.2"}
    )
    result = runner.invoke(app, ["env", "--json"])
    [blocker] = json.loads(result.stdout)["blockers"]
    assert result.exit_code == 1
    assert "pip uninstall -y onnxruntime-training onnxruntime" in blocker


def test_a_missing_package_is_said_with_its_command(pretend):
    pretend({"torch": None, "onnx": None})
    result = runner.invoke(app, ["env"])
    assert result.exit_code == 1
    for name in ("torch", "onnx"):
        assert f"Missing: {name} is not installed\n" in result.stdout
        assert re.search(rf'^  pip install "{name}[<>=].*"$', result.stdout, re.MULTILINE)


def test_a_broken_torch_is_said(monkeypatch):
    real_import = environment.importlib.import_module

    def import_module(name: str):
        if name == "torch":
            raise OSError("libtorch.so: not found")
        return real_import(name)

    monkeypatch.setattr(environment.importlib, "import_module", import_module)
    result = runner.invoke(app, ["env"])
    assert result.exit_code == 1
    assert "libtorch.so: not found" in result.stdout


def test_a_version_outside_of_the_supported_range_is_a_warning(pretend):
    pretend({"transformers": "4.57.0", "deepspeed": "0.10.0"})
    result = runner.invoke(app, ["env"])
    assert result.exit_code == 0
    assert "Warning: transformers 4.57.0 is not in the supported range" in result.stdout
    assert "Warning: deepspeed 0.10.0 is not in the supported range" in result.stdout


@pytest.mark.parametrize(
    ("distribution", "python", "warned"),
    [
        ("onnxruntime-training-cpu", "3.12.1", False),
        ("onnxruntime-training-cpu", "3.13.0", True),
        ("onnxruntime-training", "3.12.1", True),
        ("onnxruntime", "3.13.0", False),
    ],
)
def test_a_runtime_on_a_python_that_it_was_not_released_for_is_a_warning(monkeypatch, distribution, python, warned):
    found = installed_ort.Flavor(distribution, "1.19.2", True, ("CPUExecutionProvider",), 21, 10)
    monkeypatch.setattr(platform, "python_version", lambda: python)
    monkeypatch.setattr(platform, "python_version_tuple", lambda: tuple(python.split(".")))
    expected = [f"{distribution} 1.19.2 was not released for Python {python}"] if warned else []
    assert environment._python_warnings(found) == expected


@pytest.mark.parametrize(
    ("built_in", "usable", "cuda", "expected"),
    [
        (["CPU"], ["CPU"], ["H200"], "onnxruntime-gpu>="),
        (["CUDA", "CPU"], ["CPU"], ["H200"], "does not load"),
        (["CUDA", "CPU"], ["CUDA", "CPU"], [], "PyTorch sees no device"),
        (["CUDA", "CPU"], ["CUDA", "CPU"], ["H200"], None),
        (["CPU"], ["CPU"], [], None),
    ],
)
def test_a_device_that_only_one_side_can_use_is_a_warning(built_in, usable, cuda, expected):
    built_in, usable = (tuple(f"{name}ExecutionProvider" for name in names) for names in (built_in, usable))
    runtime = environment.Runtime(installed_ort.Flavor("onnxruntime", "1.31.1", False, built_in, 25, 11), usable, {})
    warnings = environment._device_warnings(runtime, environment.Devices(2, tuple(cuda)))
    assert [expected in warning for warning in warnings] == ([True] if expected else [])


@pytest.mark.parametrize(("gaps", "cuda", "warned"), [(True, [], True), (False, [], False), (True, ["H200"], False)])
def test_gaps_between_freed_blocks_are_a_warning_where_memory_is_the_c_librarys(gaps, cuda, warned, monkeypatch):
    monkeypatch.setattr(environment, "fragments_heap", lambda: gaps)
    warnings = environment._memory_warnings(environment.Devices(2, tuple(cuda)))
    assert ["GLIBC_TUNABLES=glibc.malloc.tcache_count=0" in warning for warning in warnings] == [True] * warned
