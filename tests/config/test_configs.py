"""The files in `configs/` and the reference are what the schema says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ort_accel.config import Config, load_config
from ort_accel.config.fields import all_keys, choices, schema, shape_at
from ort_accel.config.reference import _ROOT, FILES
from ort_accel.config.yaml_file import parse

CONFIGS = sorted((_ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_each_file_loads(file):
    assert (load_config(file) == Config()) == (file.name == "default.yaml")


@pytest.mark.parametrize("name", FILES)
def test_generated_files_are_in_step_with_the_schema(name):
    assert (_ROOT / name).read_text() == FILES[name](), "run `python -m ort_accel.config.reference`"


def test_default_yaml_names_every_key():
    text = (_ROOT / "configs" / "default.yaml").read_text()
    tree, _ = parse(text, "default.yaml")
    assert tree is not None
    for path in all_keys():
        if path[:2] in {("observe", "activation_statistics"), ("data", "packing")}:
            assert f"{path[-1]}: " in text
            continue
        node = tree
        for key in path:
            assert key in node.value, path
            node = node.value[key].node


def test_every_key_says_what_it_does():
    assert [path for path in all_keys() if not shape_at(path).get("description") and "$ref" not in shape_at(path)] == []


def test_no_choice_of_numbers_takes_a_boolean_or_a_fraction():
    numbers = [path for path in all_keys() if any(word.isdigit() for word in choices(shape_at(path)))]
    assert ("version",) in numbers
    for path in numbers:
        for value in (True, 1.0):
            data: object = value
            for key in reversed(path):
                data = {key: data}
            with pytest.raises(ValueError, match="validation error"):
                Config.model_validate(data)


def test_the_schema_is_found_without_torch_and_quickly():
    code = (
        "import sys, ort_accel.config; sys.exit(any(m.split('.')[0] in ('torch', 'onnxruntime') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=_ROOT, timeout=300)
    assert schema()["type"] == "object"
