"""A module of the tests in several processes that train together, none of which can hang."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "startup")])
"""Where processes that tests start find modules, and what they load first."""
GRACE = 20.0
"""Seconds that the others have once a process has failed."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(module, *arguments, ranks=2, timeout=600.0, **variables):
    """Run `python -m module RANK arguments...` in each of some processes; fails with the output of all of them.

    A process that has not ended in time, or not soon after another one failed, is stopped with the stacks of all its
    threads.
    """
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PATHS, **variables}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                command = [sys.executable, "-X", "faulthandler", "-m", module, str(rank), *map(str, arguments)]
                places = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=places, stdout=file, stderr=file, cwd=ROOT))
        _wait(processes, timeout)
        codes = [process.returncode for process in processes]
        said = [output.read_text()[-6000:] for output in outputs]
    ends = [f"rank {rank} ended with {code}\n{text}" for rank, (code, text) in enumerate(zip(codes, said, strict=True))]
    assert not any(codes), "\n".join(ends)


def runs_in_ranks(module, folders, *groups, timeout=600.0):
    """A function that gives what both processes saw of one of the runs that a module knows by name.

    The runs of a group start together, when the first of them is asked for. Each process leaves RANK.json in the folder
    that it is given, with all of them.
    """

    @cache
    def seen(group):
        folder = folders.mktemp("ranks")
        run_ranks(module, folder, *groups[group], timeout=timeout)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]

    def of(name):
        (group,) = (place for place, names in enumerate(groups) if name in names)
        return [process[name] for process in seen(group)]

    return of


def _wait(processes, timeout):
    end = time.monotonic() + timeout
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            end = min(end, time.monotonic() + GRACE)
        if time.monotonic() > end:
            for process in processes:
                process.send_signal(signal.SIGABRT)  # faulthandler then writes the stacks
            for process in processes:
                process.wait()
        time.sleep(0.05)
