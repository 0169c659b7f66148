"""Python in the README and the guides runs, on tiny models. Other snippets and all commands are checked."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from typer.main import get_command

import ort_accel.data
import ort_accel.hf
import ort_accel.optim
from ort_accel.cli.main import app
from ort_accel.run import _parser as runner_parser
from tests.hf.tiny import arguments, bert, reviews
from tests.test_docs import GUIDES, ROOT, name_of, snippets

NOT_RUN = {
    "deepspeed.initialize": "it needs a launched process",
    'to("cuda")': "it needs a device",
    "SFTTrainer(": "it needs a tokenizer of the model; examples/hf/run_sft.py is run",
    "BitsAndBytesConfig(": "it names a model; tests/models/test_qlora.py trains one",
}
"""What a snippet contains that only is checked: names can be imported, and calls fit their signatures."""

GIVEN = (accelerate, transformers, torch.utils.data, ort_accel, ort_accel.hf, ort_accel.optim, ort_accel.data)
"""The modules whose names a snippet may use without importing them; optional ones are in OPTIONAL."""
OPTIONAL = ("peft", "trl", "deepspeed")

PYTHON = [(page, text.rpartition("# after\n")[2]) for page in GUIDES for text in snippets(page, "python")]
"""Of a migration only the code after it, since the code before it needs old packages."""
COMMANDS = [(page, text) for page in [*GUIDES, ROOT / "CONTRIBUTING.md"] for text in snippets(page, "bash")]


def named(cases: list[tuple[Path, str]]) -> list[str]:
    return [f"{name_of(page)}-{number}" for number, (page, _) in enumerate(cases)]


def is_run(text: str) -> bool:
    return not any(part in text for part in NOT_RUN)


RUN = [case for case in PYTHON if is_run(case[1])]
CHECKED = [case for case in PYTHON if not is_run(case[1])]


def names_for(text: str) -> dict[str, Any]:
    """The names of the given modules, and a tiny model with its data."""
    names: dict[str, Any] = {}
    for module in (*GIVEN, *(import_module(name) for name in OPTIONAL if find_spec(name))):
        used = set(re.findall(r"\w+", text))
        names |= {name: getattr(module, name) for name in used if name[0].isalpha() and hasattr(module, name)}
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that snippets name, in a process without an Accelerator."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for file, content in {"ort_accel.yaml": "", "x.yaml": "optimizer: {name: adamw_ort_fused}\n"}.items():
        (tmp_path / file).write_text(f"version: 1\n{content}")
    (tmp_path / "configs" / "default.yaml").write_text((ROOT / "configs" / "default.yaml").read_text())
    states = AcceleratorState, PartialState, GradientState
    for shared in states:
        shared._reset_state()
    yield tmp_path
    for shared in states:
        shared._reset_state()


def given(text: str, folder: Path) -> dict[str, Any]:
    """What a snippet takes as given: a tiny model with its data, and what it uses beyond that."""
    model, data = bert(), reviews()
    names = names_for(text) | {"torch": torch, "model": model, "data": data, "dataset": data}
    if "args" in text:
        names["args"] = arguments(folder / "out")
    if "connect(accelerator" in text:
        names["accelerator"] = Accelerator(cpu=True)
        names["optimizer"] = ort_accel.optim.FusedAdam(model.parameters())
    names["batch"] = {key: torch.stack([torch.as_tensor(row[key]) for row in data[:2]]) for key in data[0]}
    if "backward(loss)" in text:
        model.bfloat16()
        names["loss"] = model(**names["batch"]).loss
    return names


@pytest.mark.parametrize(("page", "text"), RUN, ids=named(RUN))
def test_it_runs(page: Path, text: str, folder: Path) -> None:
    if "LoraConfig" in text:
        pytest.importorskip("peft")
    names = given(text, folder)
    exec(compile(text, name_of(page), "exec"), names)
    if isinstance(trainer := names.get("trainer"), transformers.Trainer):
        trainer.args.max_steps = 1
        trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.parametrize(("page", "text"), CHECKED, ids=named(CHECKED))
def test_its_names_can_be_imported_and_its_calls_fit(page: Path, text: str) -> None:
    tree, names = ast.parse(text.replace("...)", ")")), names_for(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = pytest.importorskip(node.module)
            names |= {alias.name: getattr(module, alias.name) for alias in node.names}
    check_calls(tree, names)


def check_calls(tree: ast.AST, names: Mapping[str, Any]) -> None:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        target = names.get(ast.unparse(call.func))
        if target is not None:
            keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            inspect.signature(target).bind_partial(*call.args, **keywords)


API = (ROOT / "docs" / "python.md").read_text(encoding="utf-8").split("\n## ")[1:]


@pytest.mark.parametrize("section", API, ids=[section.partition("\n")[0] for section in API])
def test_the_python_api_has_every_public_name_and_its_calls_fit(section: str) -> None:
    module = import_module(section.partition("\n")[0])
    spelled = " ".join(re.findall("`([^`]+)`", section))
    assert set(module.__all__) - {"__version__"} <= set(re.findall(r"\w+", spelled))
    names = {name: getattr(module, name) for name in module.__all__}
    for first in re.findall(r"^\| `([^`]+)`", section, re.MULTILINE):
        check_calls(ast.parse(first.replace("...)", ")")), names)


def lines(text: str) -> Iterator[list[str]]:
    """The words of each command, without comments and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition(" > ")[0] if " > " in line else line, comments=True)
        if words:
            yield words


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(words) <= targets


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert words[0] == "install"
    assert all(name in extras for word in words for found in re.findall(r"\[(.*)\]", word) for name in found.split(","))


def check_ort_accel(words: list[str]) -> None:
    command = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    own = words[1:]
    if words[0] == "launch":
        known |= options_of(launch_command_parser())
        own = own[: next(number for number, word in enumerate(own) if word.endswith(".py"))]
    assert options(own) <= known


def check_runner(words: list[str]) -> None:
    """`torchrun` and `accelerate launch` start the runner."""
    own = words[words.index("-m") + 1 :]
    assert own[0] == "ort_accel.run"
    assert options(own[: own.index("train.py")]) <= options_of(runner_parser())


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        package = words[1].partition(".")[0]
        assert find_spec(words[1]) if find_spec(package) else package in OPTIONAL
        return
    script = ROOT / words[0]
    sys.path.insert(0, str(script.parent))
    try:
        here = [*vars(import_module(script.stem)).values()]
    finally:
        sys.path.remove(str(script.parent))
    beside = [module for module in here if isinstance(module, ModuleType) and module.__name__.startswith("run_")]
    classes = [*here, *(found for module in beside for found in vars(module).values())]
    fields = {field for found in classes if is_dataclass(found) for field in found.__dataclass_fields__}
    assert {option.removeprefix("--") for option in options(words)} <= fields


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "pip": check_pip,
    "ort-accel": check_ort_accel,
    "torchrun": check_runner,
    "accelerate": check_runner,
    "python": check_python,
}


@pytest.mark.parametrize(("page", "text"), COMMANDS, ids=named(COMMANDS))
def test_each_command_exists_with_its_options(page: Path, text: str) -> None:
    for words in lines(text):
        assert words[0] in CHECKS, f"{name_of(page)}: nobody checks {words}"
        CHECKS[words[0]](words[1:])


def test_what_is_not_run_is_there() -> None:
    assert [part for part in NOT_RUN if not any(part in text for _, text in PYTHON)] == []
    assert len(RUN) > len(CHECKED)
    assert sys.version_info >= (3, 11)
