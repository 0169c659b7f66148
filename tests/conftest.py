"""What tests of several rooms use."""

import gc

from tests.pretend_cuda import cuda_device

__all__ = ["cuda_device"]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through everything that was imported, each time that a test compiles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
