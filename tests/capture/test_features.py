"""No switch is without effect and without a word: it is obeyed, reported as missing, or refused."""

from operator import attrgetter
from pathlib import Path

import pytest
from pydantic import BaseModel
from torch import nn

import ort_accel
from ort_accel import ConfigError
from ort_accel.capture.features import FIXED, MISSING, OBEYED
from ort_accel.config import Config
from ort_accel.reporting import State

CONFIGS = Path(__file__).parents[2] / "configs"

UNUSUAL = {
    "memory.early_gradient_release": True,
}


def leaves(section, path=""):
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{path}{name}.")
        else:
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


def test_every_key_is_either_obeyed_or_missing_or_fixed():
    assert sorted(leaves(Config())) == sorted([*OBEYED, *MISSING, *FIXED])


def test_every_missing_feature_has_a_row_that_says_so():
    found = features()
    for path in MISSING:
        assert found[path].state is not State.APPLIED, path
        assert found[path].reason in ("not in this version", "not asked for"), path


@pytest.mark.parametrize("path", UNUSUAL)
def test_a_wish_that_cannot_be_obeyed_is_an_error(path):
    wish = nested((path, UNUSUAL[path]))
    with pytest.raises(ConfigError, match=rf"{path}: .* not to be had in this version"):
        ort_accel.accelerate(nn.Linear(2, 2), wish)


def test_all_such_wishes_are_named_at_once():
    optimizer = {"name": "adamw_ort_fused", "step_in_backward": True}
    with pytest.raises(ConfigError) as caught:
        features(memory={"early_gradient_release": True}, optimizer=optimizer)
    wanted = ["memory.early_gradient_release", "optimizer.step_in_backward"]
    assert [problem.path for problem in caught.value.problems] == wanted


@pytest.mark.parametrize("path", [path for path in MISSING if MISSING[path] in (False, 0)])
def test_doing_without_what_is_missing_is_obeyed(path):
    default = attrgetter(path)(Config())
    found = features(**nested((path, MISSING[path])))
    assert found[path].state is State.OFF
    assert found[path].reason == ("not asked for" if default == MISSING[path] else "switched off")


def test_what_is_obeyed_says_what_it_does(tmp_path):
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


def test_fusions_off_leaves_the_graph_to_onnxruntime_as_it_is():
    model = ort_accel.accelerate(nn.Linear(2, 2), {"compute": {"fusions": False}})
    assert model._compiled_call_impl.backend.lowering.sessions.settings.optimize is False
