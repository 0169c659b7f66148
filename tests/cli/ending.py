"""Runs a script that ends in several ways, each in a process forked from here. Started by test_endings.py."""

import json
import os
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
    if "alone" not in how:
        os.environ["WORLD_SIZE"] = "1"
    sys.argv = ["ort_accel.run", str(SCRIPT), how, str(folder)]
    run.main()
    sys.exit()


def main(folder, *ways):
    codes = {}
    for how in ways:
        place = Path(folder, how)
        place.mkdir()
        child = os.fork()
        if child == 0:
            end(how, place)
        codes[how] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(folder, "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
