"""A fixture for all tests of recompute."""

import pytest

from ort_accel.partition import merge_small_segments


@pytest.fixture(autouse=True)
def every_operator_keeps_its_runner(monkeypatch):
    """Keep the runner of every operator, wherever recompute and offload cut the step.

    In small models, most segments of ONNX Runtime are small enough to be merged into segments of PyTorch."""
    monkeypatch.setattr(merge_small_segments, "MOST_ELEMENTS", 0)
