"""Processes that begin with everything imported, for tests in which processes die."""

import multiprocessing
from collections.abc import Callable
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
    """What a function puts into the queue that it is given first, in a process without memory of other tests."""
    results = START.Queue()
    process = START.Process(target=function, args=(results, *args))
    process.start()
    found = results.get(timeout=900)
    process.join()
    return found
