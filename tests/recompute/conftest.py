"""A fixture for all tests of recompute."""

import pytest

from ort_accel.partition import placement


@pytest.fixture(autouse=True)
def every_operator_keeps_its_runner(monkeypatch):
    """Keep the runner of every operator, wherever recompute and offload cut the step.

    In small models, most segments of ONNX Runtime are small enough to be merged into segments of PyTorch."""
    monkeypatch.setattr(placement, "MIN_HANDOVER_ELEMENTS", 0)
