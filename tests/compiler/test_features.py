"""No switch is without effect and without a word: it is obeyed, reported as missing, or refused."""

import ast
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from torch import nn

import ort_accel
from ort_accel import ConfigError
from ort_accel.config import Config
from ort_accel.reporting import State

CONFIGS = Path(__file__).parents[2] / "configs"
PACKAGE = Path(ort_accel.__file__).parent


def keys(section, path=""):
    """The keys that have a choice of values."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from keys(value, f"{path}{name}.")
        elif not (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1):
            yield f"{path}{name}"


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


def names_outside_of_the_configuration():
    """The attributes, arguments and texts in the code of all rooms but `config`."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "config" not in path.parents:
            for node in ast.walk(ast.parse(path.read_text())):
                found.add(getattr(node, "attr", None) or getattr(node, "arg", None) or getattr(node, "value", None))
    return {name for name in found if isinstance(name, str)}


def test_every_key_is_read_outside_of_the_configuration():
    names = names_outside_of_the_configuration()
    assert [key for key in keys(Config()) if key.rsplit(".", 1)[-1] not in names] == []


def test_a_value_that_cannot_be_obeyed_is_an_error():
    with pytest.raises(ConfigError, match=r"compute.triton.enabled: ort_accel generates no Triton kernels"):
        ort_accel.accelerate(nn.Linear(2, 2), {"compute": {"triton": {"enabled": True}}})


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
