"""Any module of the package may be the first that somebody imports: none may need another to be there before it."""

import subprocess
import sys

ALONE = """
import importlib, os, pkgutil
import accelerate, onnx_ir, torch._dynamo, torch._functorch.aot_autograd, transformers
import ort_accel

for module in pkgutil.walk_packages(ort_accel.__path__, "ort_accel."):
    if module.name.endswith("__main__"):
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


def test_each_module_can_be_imported_first():
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert len(run.stdout) > 200
    assert set(run.stdout) == {"."}, run.stdout
