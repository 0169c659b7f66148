"""The native library is found and loaded, or a sentence says why not and names the command that builds it."""

import _ctypes
import ctypes
import importlib.metadata
import json
import os
import platform
import shutil
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ort_accel
from ort_accel.cli import environment
from ort_accel.cli.main import app
from ort_accel.compiler import features
from ort_accel.native import library
from ort_accel.native.library import INSTRUCTION_SETS, LIBRARY_FILE, NativeStatus, kernel, native_library, native_status
from ort_accel.reporting.report import State

needs_library = pytest.mark.skipif(native_library() is None, reason=f"the native library is {native_status()}")
GONE = NativeStatus(missing="it was not built when ort_accel was installed; build it with `make native`")


@pytest.fixture
def lie_at(monkeypatch):
    """Let the library lie elsewhere. What was loaded is forgotten, and is loaded again afterwards."""

    def elsewhere(path: Path) -> None:
        monkeypatch.setattr(library, "LIBRARY_FILE", path)
        forget()

    def forget() -> None:
        library._load.cache_clear()
        native_status.cache_clear()

    yield elsewhere
    forget()


@pytest.fixture
def tools(monkeypatch):
    """Let only these programs be on the path."""

    def only(*names: str) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in names else None)

    return only


@pytest.fixture
def installed_from(monkeypatch):
    """Let pip have installed the package from there."""

    def origin(known: dict[str, object] | None) -> None:
        text = json.dumps(known) if known else None
        distribution = types.SimpleNamespace(read_text=lambda name: text)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)

    return origin


@needs_library
def test_the_library_lies_beside_its_python_code_and_is_loaded_once():
    assert LIBRARY_FILE.parent.name == "native"
    assert native_library() is native_library()


@needs_library
def test_the_status_names_the_instruction_sets():
    status = native_status()
    assert 0 <= native_library().ort_accel_level() <= 2
    assert status.built_for[0] == "baseline"
    assert status.runs in status.built_for
    assert not status.missing
    assert str(status) == f"built for {', '.join(status.built_for)}; {status.runs} runs here"
    if platform.machine() == "x86_64":
        assert status.built_for == INSTRUCTION_SETS


@needs_library
@pytest.mark.parametrize("level", range(len(INSTRUCTION_SETS)), ids=INSTRUCTION_SETS)
def test_a_kernel_runs_in_every_variant(level):
    if level > native_library().ort_accel_level():
        pytest.skip("this processor lacks the instructions")
    pack_bits = kernel("pack_bits", ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, level=level)
    truth = [index % 3 == 0 for index in range(187)]
    bits = (ctypes.c_uint8 * 24)()
    pack_bits((ctypes.c_uint8 * len(truth))(*truth), len(truth), bits)
    assert [bits[at // 8] >> at % 8 & 1 for at in range(192)] == [*truth, *[0] * 5]


@needs_library
def test_a_forked_process_has_the_library():
    child = os.fork()
    if not child:
        os._exit(native_library().ort_accel_level())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == native_library().ort_accel_level()


@needs_library
def test_an_unknown_kernel_is_named():
    with pytest.raises(AssertionError, match="has no kernel no_such_kernel"):
        kernel("no_such_kernel")


def missing_reason(lie_at, path: Path) -> str:
    lie_at(path)
    assert native_library() is None
    assert str(native_status()) == f"missing: {native_status().missing}"
    return native_status().missing


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The folder of a checkout in which the library was not built."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_checkout_without_the_library_is_told_to_make_it(lie_at, tools, checkout):
    tools("g++")
    found = missing_reason(lie_at, checkout / "ort_accel/native/libort_accel.so")
    assert found == f"it was not built when ort_accel was installed; build it with `make -C {checkout} native`"


@pytest.mark.parametrize(
    ("known", "source"),
    [
        ({"url": "file:///home/me/ort_accel", "dir_info": {}}, '"ort-accel @ file:///home/me/ort_accel"'),
        ({"url": "https://host/x.git", "vcs_info": {"vcs": "git"}}, '"ort-accel @ git+https://host/x.git"'),
        ({"url": "file:///tmp/ort_accel-0.2.0-py3-none-any.whl"}, "--no-binary ort-accel ort-accel"),
        (None, "--no-binary ort-accel ort-accel"),
    ],
)
def test_an_installed_package_without_the_library_is_told_to_install_it_again(
    known, source, lie_at, tools, installed_from, tmp_path
):
    tools("clang++")
    installed_from(known)
    command = f"pip install --force-reinstall --no-deps --no-cache-dir {source}"
    found = missing_reason(lie_at, tmp_path / "site-packages/ort_accel/native/libort_accel.so")
    assert found == f"it was not built when ort_accel was installed; build it with `{command}`"


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("apt-get", "`sudo apt-get install -y g++ && make"),
        ("dnf", "`sudo dnf install -y gcc-c++ && make"),
        ("pacman", "install one, and then `make"),
    ],
)
def test_without_a_compiler_that_is_installed_first(tool, said, lie_at, tools, checkout):
    tools(tool)
    found = missing_reason(lie_at, checkout / "ort_accel/native/libort_accel.so")
    assert found == f"it was not built, since there is no C++17 compiler; {said} -C {checkout} native`"


def test_a_library_that_does_not_load_is_said_in_the_loaders_words(lie_at, tmp_path):
    path = tmp_path / "ort_accel/native/libort_accel.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library, but long enough to have a header" * 9)
    found = missing_reason(lie_at, path)
    assert found.startswith(f"it does not load ({path}: invalid ELF header); build it anew with `pip install --force")


def test_a_library_that_lacks_a_function_is_of_another_version(lie_at):
    found = missing_reason(lie_at, Path(_ctypes.__file__))
    assert found.startswith("it is of another version (")
    assert "undefined symbol: ort_accel_level" in found


def test_other_systems_have_none(lie_at, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert missing_reason(lie_at, LIBRARY_FILE) == "it is built for Linux only, and this is Darwin"


@pytest.mark.parametrize("status", [native_status(), GONE], ids=["as it is", "missing"])
def test_env_says_it_in_a_line_and_as_json(status, monkeypatch):
    monkeypatch.setattr(environment, "native_status", lambda: status)
    assert f"native library    {status}\n" in CliRunner().invoke(app, ["env"]).stdout
    found = json.loads(CliRunner().invoke(app, ["env", "--json"]).stdout)
    assert found["native"] == {
        "built_for": list(status.built_for),
        "runs": status.runs,
        "missing": status.missing,
    }
    assert found["can_train"] is True


@needs_library
def test_the_report_names_the_instruction_sets(caplog):
    feature = ort_accel.report(ort_accel.accelerate(nn.Linear(2, 2))).features["native library"]
    assert (feature.state, feature.effect) == (State.APPLIED, str(native_status()))
    assert "native library" not in caplog.text


def test_without_the_library_models_train_and_report_and_log_say_so_once(monkeypatch, caplog):
    monkeypatch.setattr(features, "native_status", lambda: GONE)
    features._say_once.cache_clear()
    for _ in range(2):
        model = ort_accel.accelerate(nn.Linear(2, 2))
        model(torch.ones(2, 2)).sum().backward()
        feature = ort_accel.report(model).features["native library"]
        assert (feature.state, feature.reason) == (State.REFUSED, GONE.missing)
    assert [line for line in caplog.messages if "native library" in line] == [
        "there are no kernels of ort_accel's own, because the native library is missing: it was not built "
        "when ort_accel was installed; build it with `make native`"
    ]
