"""What the configuration asks of the runtime is there, or is an error that says how to get it."""

import pytest
import torch

from ort_accel.compiler.settings import NEWEST_OPSET, chosen_runtime, opset, session_settings
from ort_accel.config import load_config
from ort_accel.errors import OrtAccelError
from ort_accel.runtime.installed_ort import installed_runtime


def config(**engine):
    return load_config({"version": 1, "engine": engine})


def test_the_installed_runtime_is_taken_by_default():
    assert chosen_runtime(config()) == installed_runtime()


def test_naming_a_runtime_that_is_not_installed_is_an_error():
    is_training = installed_runtime().is_training_build
    here, other = ("onnxruntime-training", "onnxruntime") if is_training else ("onnxruntime", "onnxruntime-training")
    assert chosen_runtime(config(runtime=here)) == installed_runtime()
    with pytest.raises(OrtAccelError, match=rf"engine\.runtime is {other}, but .* is installed; .*pip install"):
        chosen_runtime(config(runtime=other))


def test_threads_are_pytorchs_unless_named():
    assert session_settings(config()).threads == torch.get_num_threads()
    assert session_settings(config(threads=3)).threads == 3


def test_determinism_follows_pytorch_unless_named():
    assert not session_settings(config()).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert session_settings(config()).deterministic
        assert not session_settings(config(deterministic=False)).deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_operator_set_is_the_newest_that_both_know():
    assert opset(config(), installed_runtime()) == min(NEWEST_OPSET, installed_runtime().newest_opset)
    assert opset(config(opset=18), installed_runtime()) == 18
