"""Importing the engine leaves torch and the standard output as they are."""

import subprocess
import sys

import pytest

from tests.tiers import mostly_long

LOOK = """
import torch.utils.checkpoint
before = torch.utils.checkpoint.checkpoint
{imports}
assert torch.utils.checkpoint.checkpoint is before, torch.utils.checkpoint.checkpoint
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "imports",
    mostly_long(
        [
            "from ort_accel import accelerate",
            "import onnxruntime; from ort_accel import accelerate",
            "from ort_accel.runtime.installed_ort import installed_runtime; installed_runtime()",
        ],
        "import onnxruntime; from ort_accel import accelerate",
    ),
)
def test_torchs_checkpoint_function_stays_torchs(imports):
    done = run(LOOK.format(imports=imports))
    assert done.returncode == 0, done.stderr


def test_deepspeed_is_neither_imported_nor_hidden():
    code = "import sys, ort_accel.runtime.session; print(sorted({'deepspeed'} & sys.modules.keys()))"
    assert run(code).stdout == "[]\n"
