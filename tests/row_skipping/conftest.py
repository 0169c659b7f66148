"""Fixtures of all tests of row skipping."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """Make each test compile: Dynamo knows a backend by its id, which the backend of an earlier test may have had."""
    torch._dynamo.reset()
