"""The installed ONNX Runtime is asked what it can do; a missing, doubled or broken one is one clear error."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ort_accel.errors import RuntimeMissingError
from ort_accel.runtime import installed_ort, ort_distributions
from ort_accel.runtime.kernel_probes import FUSED, PROBES, RECENT, TRAINING

real_version = importlib.metadata.version


@pytest.fixture
def install(monkeypatch):
    """Pretend that exactly these distributions of ONNX Runtime are installed."""

    def pretend(**versions: str) -> None:
        installed = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name: str) -> str:
            if name not in ort_distributions.DISTRIBUTIONS:
                return real_version(name)
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


ROOT = Path(__file__).parents[2]


def test_importing_the_module_does_not_import_onnxruntime():
    code = (
        "import sys, ort_accel.runtime.installed_ort; sys.exit('onnxruntime' in sys.modules or 'onnx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_installed_runtime_names_itself():
    import onnxruntime

    found = installed_ort.installed_runtime()
    assert found.version == onnxruntime.__version__
    assert found.is_training_build == ("training" in found.distribution)
    assert "CPUExecutionProvider" in found.providers


def test_no_newer_opset_than_the_newest_is_run():
    found = installed_ort.installed_runtime()
    assert installed_ort._session(installed_ort._common_model(found.newest_opset, found.newest_ir_version))
    for opset, ir_version in [(found.newest_opset + 1, 8), (17, found.newest_ir_version + 1)]:
        with pytest.raises(Exception, match=r"opset|IR version"):
            installed_ort._session(installed_ort._common_model(opset, ir_version))


def test_training_kernels_run_on_training_builds_only():
    present = installed_ort.kernels(TRAINING)
    assert set(present.values()) == {installed_ort.installed_runtime().is_training_build}
    assert set(present) == set(TRAINING)


def test_fused_kernels_run_on_every_runtime():
    assert {name: installed_ort.kernel_refusal(name) for name in FUSED} == dict.fromkeys(FUSED)


def test_recent_operators_run_where_their_opset_does():
    newest = installed_ort.installed_runtime().newest_opset
    assert installed_ort.kernels(RECENT) == {name: PROBES[name].version <= newest for name in RECENT}


def test_a_missing_kernel_comes_with_the_runtimes_own_reason():
    missing = [name for name, runs in installed_ort.kernels().items() if not runs]
    assert missing, "each supported runtime lacks something"
    for name in missing:
        reason = installed_ort.kernel_refusal(name)
        assert reason
        assert "\n" not in reason


def test_a_kernel_without_a_probe_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'com\.microsoft\.Nothing'; known are .*com\.microsoft\.GatherGrad"):
        installed_ort.kernels(["com.microsoft.Nothing"])


def test_a_provider_that_is_not_built_in_does_not_run():
    assert installed_ort.provider_runs("CPUExecutionProvider")
    assert not installed_ort.provider_runs("NoSuchExecutionProvider")


def test_no_runtime_names_the_extra_to_install(install):
    install()
    with pytest.raises(RuntimeMissingError, match=r'pip install "onnxruntime(-training-cpu==|>=)'):
        installed_ort.installed_runtime()


@pytest.mark.parametrize(("python", "extra"), [((3, 11), "training"), ((3, 12), "training"), ((3, 13), "cpu")])
def test_only_extras_that_exist_for_a_version_of_python_are_named(python, extra):
    said = str(ort_distributions.none_installed(python))
    assert f"for Python 3.{python[1]} install one with `{ort_distributions.install_command(extra)}`" in said
    assert ("onnxruntime-training-cpu" in said) == (python < (3, 13))
    assert ("onnxruntime-training==" in said) == (python < (3, 12))


def test_commands_name_the_packages_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra: extras[extra] for extra in ort_distributions.EXTRAS.values()} == {
        extra: [requirement] for extra, requirement in ort_distributions.REQUIREMENTS.items()
    }


WITHOUT = """
import sys
sys.modules["onnxruntime"] = None
from ort_accel.runtime import ort_distributions
ort_distributions.DISTRIBUTIONS = ()
{code}
"""


@pytest.mark.parametrize(
    "code",
    [
        "import torch, ort_accel; ort_accel.accelerate(torch.nn.Linear(2, 2))",
        "from ort_accel.cli.main import main; sys.argv = ['ort-accel', 'bench', '--steps', '1']; main()",
        "from ort_accel.cli.main import main; sys.argv = ['ort-accel', 'launch', '--cpu', 'train.py']; main()",
    ],
    ids=["accelerate", "bench", "launch"],
)
def test_without_a_runtime_one_error_says_so(code):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(code=code)], capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError" not in done.stderr
    assert "no ONNX Runtime is installed; for Python" in done.stderr.splitlines()[-1]
    if "main()" in code:
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def test_two_runtimes_name_both_and_the_commands_that_leave_one(install):
    install(onnxruntime="1.31.1", onnxruntime_gpu="1.30.0")
    with pytest.raises(RuntimeMissingError) as caught:
        installed_ort.installed_runtime()
    message = str(caught.value)
    assert "onnxruntime-gpu 1.30.0, onnxruntime 1.31.1" in message
    assert '`pip uninstall -y onnxruntime-gpu onnxruntime` and then `pip install "onnxruntime-gpu>=1.24,<2"`' in message
    assert "\n" not in message


def test_a_runtime_of_another_vendor_counts_as_one(install):
    install(onnxruntime_directml="1.24.0", ort_nightly="1.32.0")
    with pytest.raises(RuntimeMissingError, match="pip install onnxruntime-directml"):
        installed_ort.installed_runtime()


@pytest.mark.parametrize("failure", [ImportError("libcudart.so.13: not found\n  twice"), AttributeError("torn")])
def test_a_runtime_that_does_not_import_says_why_and_how_to_mend_it(install, monkeypatch, failure):
    def import_module(name: str):
        raise failure

    install(onnxruntime_gpu="0.0.1")
    monkeypatch.setattr(installed_ort.importlib, "import_module", import_module)
    with pytest.raises(
        RuntimeMissingError, match=r"onnxruntime-gpu 0\.0\.1 is installed but .*onnxruntime-gpu>="
    ) as caught:
        installed_ort.installed_runtime()
    assert caught.value.__cause__ is failure
    assert "\n" not in str(caught.value)
