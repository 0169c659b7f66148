"""Processes that begin with everything imported, for tests in which processes die."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

import pytest

START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(
    [
        "ort_accel.engine",
        "torch._dynamo.convert_frame",
        "torch._functorch.aot_autograd",
        "torch.nn.parallel.distributed",
    ]
)


def answer(results: Queue, function: Callable[..., None], *args: Any) -> None:
    """Calls a function, and puts the traceback of its error into the queue."""
    try:
        function(results, *args)
    except BaseException:  # a failure of pytest is none of Exception
        results.put(RuntimeError(traceback.format_exc()))


def asked(function: Callable[..., None], *args: Any) -> Any:
    """Returns what a function puts into the queue that it is given first, in a process of its own."""
    results = START.Queue()
    process = START.Process(target=answer, args=(results, function, *args))
    process.start()
    while True:
        is_running = process.is_alive()
        try:
            found = results.get(timeout=5)
        except Empty:
            assert is_running, f"the process ended with {process.exitcode} and without a result"
            continue
        process.join()
        if isinstance(found, RuntimeError):
            pytest.fail(f"the process failed: {found}")
        return found
