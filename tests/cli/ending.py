"""Runs a script that ends in several ways, each in a process of its own. Started by test_endings.py.

Those of a group are forked from here. One that ends as Python does is not: threads of onnxruntime that were left behind
by a fork are waited for in vain.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import ort_accel.hf.accelerate_plugin  # noqa: F401  (once for all)
from ort_accel import run

SCRIPT = Path(__file__).parent / "scripts" / "ends.py"


def end(how, folder):
    """Run the script as a process would that was started for it."""
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ["WORLD_SIZE"] = "1"
    sys.argv = ["ort_accel.run", str(SCRIPT), how, str(folder)]
    run.main()
    sys.exit()


def forked(how, folder):
    child = os.fork()
    if child == 0:
        end(how, folder)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def alone(how, folder):
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        command = [sys.executable, "-m", "ort_accel.run", SCRIPT, how, folder]
        return subprocess.run(command, stdout=out, stderr=err, check=False).returncode


def main(folder, *ways):
    codes = {}
    for how in ways:
        place = Path(folder, how)
        place.mkdir()
        codes[how] = alone(how, place) if "alone" in how else forked(how, place)
    Path(folder, "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
