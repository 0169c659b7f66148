"""Processes that begin with everything imported, for tests in which processes die."""

import multiprocessing
from collections.abc import Callable
from queue import Empty
from typing import Any

START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(
    [
        "ort_accel.engine",
        "torch._dynamo.convert_frame",
        "torch._functorch.aot_autograd",
        "torch.nn.parallel.distributed",
    ]
)


def asked(function: Callable[..., None], *args: Any) -> Any:
    """Returns what a function puts into the queue that it is given first, in a process of its own."""
    results = START.Queue()
    process = START.Process(target=function, args=(results, *args))
    process.start()
    while True:
        is_running = process.is_alive()
        try:
            found = results.get(timeout=5)
        except Empty:
            assert is_running, f"the process ended with {process.exitcode} and without a result"
        else:
            process.join()
            return found
