"""No switch is without effect and without a word: it is obeyed, reported as missing, or refused."""

import ast
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from torch import nn

import ort_accel
from ort_accel import ConfigError
from ort_accel.config import Config
from ort_accel.config.declaration import NO_ROW, declared, section_of
from ort_accel.reporting.report import State

CONFIGS = Path(__file__).parents[2] / "configs"
PACKAGE = Path(ort_accel.__file__).parent


def nested(*pairs):
    tree = {}
    for path, value in pairs:
        *sections, key = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return tree


def features(**sections):
    return ort_accel.report(ort_accel.accelerate(nn.Linear(2, 2), sections)).features


def names_in_code_outside_of_config():
    files = [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] != "config"]
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def has_a_choice(field):
    return get_origin(field.annotation) is not Literal or len(get_args(field.annotation)) > 1


def test_code_outside_of_the_configuration_reads_every_key():
    keys = [key for key, field in declared(Config) if section_of(field) is None and has_a_choice(field)]
    read = set(names_in_code_outside_of_config())
    assert [key for key in keys if key.rpartition(".")[2] not in read] == []


def test_every_key_has_a_row_or_declares_that_it_needs_none():
    rows = features()
    needed = {key for key, field in declared(Config) if section_of(field) is None and NO_ROW not in field.metadata}
    assert sorted(needed - rows.keys()) == []


def test_a_value_that_cannot_be_obeyed_is_an_error():
    with pytest.raises(ConfigError, match=r"generated.enabled: times decide which kernels run, and"):
        ort_accel.accelerate(
            nn.Linear(2, 2), {"compute": {"generated": {"enabled": True}}, "engine": {"deterministic": True}}
        )


def test_the_report_says_what_each_key_does(tmp_path):
    found = features(
        engine={"threads": 3, "cache_dir": str(tmp_path), "run_in_pytorch": ["aten.gelu"], "deterministic": True}
    )
    assert "3 threads" in found["engine"].effect
    assert str(tmp_path) in found["engine.cache_dir"].effect
    assert found["engine.run_in_pytorch"].effect == "aten.gelu"
    assert found["engine.deterministic"].state is State.APPLIED


def test_engine_off_obeys_nothing_else():
    model = ort_accel.accelerate(nn.Linear(2, 2), {"engine": {"enabled": False}, "memory": {"level": 1}})
    assert model._compiled_call_impl is None


def test_the_default_configuration_can_be_obeyed():
    ort_accel.accelerate(nn.Linear(2, 2), CONFIGS / "default.yaml")


def test_fusions_off_turns_optimizations_of_onnx_runtime_off():
    model = ort_accel.accelerate(nn.Linear(2, 2), {"compute": {"fusions": False}})
    assert model._compiled_call_impl.backend.lowering.sessions.settings.optimize is False


def test_naming_an_unknown_operator_is_an_error():
    for name, meant in (("aten.geluu", "aten.gelu"), ("aten.gelu.no_such", "aten.gelu")):
        with pytest.raises(
            ConfigError, match=rf"engine\.run_in_pytorch: PyTorch .* has no {name}; did you mean {meant}\?"
        ):
            ort_accel.accelerate(nn.Linear(2, 2), {"engine": {"run_in_pytorch": ["aten.tanh", name]}})
    ort_accel.accelerate(nn.Linear(2, 2), {"engine": {"run_in_pytorch": ["aten.add.Tensor", "mine.operator"]}})
