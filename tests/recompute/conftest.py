"""What all tests of recomputation need."""

import pytest

from ort_accel.partition import placement


@pytest.fixture(autouse=True)
def every_operator_keeps_its_runner(monkeypatch):
    """The same kernels run wherever a step is cut for what is computed again or moved. In models as small as these,
    most of what ONNX Runtime runs between parts of PyTorch is an island, and the cuts would decide what is one."""
    monkeypatch.setattr(placement, "MIN_SEGMENT_ELEMENTS", 0)
