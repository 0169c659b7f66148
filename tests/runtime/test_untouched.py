"""Importing the engine leaves torch as it is."""

import subprocess
import sys

import pytest

LOOK = """
import torch.utils.checkpoint
before = torch.utils.checkpoint.checkpoint
{imports}
assert torch.utils.checkpoint.checkpoint is before, torch.utils.checkpoint.checkpoint
"""


@pytest.mark.parametrize(
    "imports",
    [
        "from ort_accel import accelerate",
        "import onnxruntime; from ort_accel import accelerate",
        "from ort_accel.runtime.flavor import installed_runtime; installed_runtime()",
    ],
)
def test_torchs_checkpoint_function_stays_torchs(imports):
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(imports=imports)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
