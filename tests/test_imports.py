"""Any module of the package may be the first that somebody imports: none may need another to be there before it."""

import subprocess
import sys

import pytest

ALONE = """
import importlib, os, pkgutil, sys
import accelerate, onnx_ir, torch._dynamo, torch._functorch.aot_autograd, transformers
import ort_accel

for number, module in enumerate(pkgutil.walk_packages(ort_accel.__path__, "ort_accel.")):
    if number % int(sys.argv[1]) or module.name.endswith(("__main__", "libort_accel")):
        continue
    if not (child := os.fork()):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(module.name, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(end=".", flush=True)
"""


@pytest.mark.parametrize("distance", [8, pytest.param(1, marks=pytest.mark.long)])
def test_each_module_can_be_imported_first(distance):
    """With a distance of 8, each eighth one. That imports make no circle is checked for all files by test_floors.py."""
    command = [sys.executable, "-c", ALONE, str(distance)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(run.stdout) > 200 // distance
    assert set(run.stdout) == {"."}, run.stdout
