"""Ends in one of several ways, alone or in a process group that has a thread at work for Python."""

import atexit
import sys
import threading
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist

import ort_accel


class Last:
    """Goes when the interpreter takes itself apart, and not before."""

    def __init__(self, file):
        self.write = file.write_text

    def __del__(self):
        self.write("apart")


def keep(folder, **more):
    """Hold things from a module of its own, which the end of the script does not touch."""
    file = Path(folder, "kept").open("w")  # noqa: SIM115  (closed by nobody)
    file.write("all of it")
    sys.modules["kept"] = types.SimpleNamespace(file=file, last=Last(Path(folder, "interpreter")), **more)
    atexit.register(Path(folder, "goodbye").touch)
    threading.Timer(0.2, Path(folder, "thread").touch).start()


def join(folder):
    """Begin a group that outlives its end, with a thread that wants the interpreter in a second."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    keep(folder, group=dist.group.WORLD)
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: time.sleep(1))


def main(how, folder):
    keep(folder) if "alone" in how else join(folder)
    if how.startswith("exits with 3"):
        sys.exit(3)
    if how == "exits with a text":
        sys.exit("a text")
    if how == "fails":
        raise ValueError("a failure")
    if how == "has no memory":
        raise MemoryError("of this process")
    if how == "is refused":
        raise ort_accel.OrtAccelError("a refusal")
    if how == "leaves the group itself":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
