"""Processes that begin with everything imported, for tests in which processes die."""

import multiprocessing

START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(
    [
        "ort_accel.engine",
        "torch._dynamo.convert_frame",
        "torch._functorch.aot_autograd",
        "torch.nn.parallel.distributed",
    ]
)
