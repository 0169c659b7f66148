"""Tensors reach ONNX Runtime and come back in their own type, booleans too, and without a copy."""

import pytest
import torch

from ort_accel.runtime.dlpack import OrtValues, to_ort, to_torch

TENSORS = {
    "booleans": torch.tensor([True, False, True]),
    "floats": torch.arange(6.0).view(2, 3),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "integers": torch.tensor(7),
    "none": torch.zeros(0, 2, dtype=torch.bool),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name):
    tensor = TENSORS[name]
    values = OrtValues()
    values.push_back(to_ort(tensor))
    [found] = to_torch(values, 1)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    assert found.data_ptr() == tensor.data_ptr() or not tensor.numel()


def test_booleans_stand_among_others():
    values = OrtValues()
    for tensor in TENSORS.values():
        values.push_back(to_ort(tensor))
    assert [found.dtype for found in to_torch(values, len(TENSORS))] == [tensor.dtype for tensor in TENSORS.values()]
