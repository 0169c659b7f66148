"""What tests of several rooms use."""

import gc

import pytest
from torch._dynamo.pgo import reset_code_state

from tests.pretend_cuda import cuda_device

__all__ = ["cuda_device"]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through everything that was imported, each time that a test compiles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def sizes_are_new() -> None:
    """Let each test meet sizes for the first time: torch 2.11 notes which sizes of a function change, of all models."""
    reset_code_state()
