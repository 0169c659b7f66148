"""Operations on many tensors, and what they assume of PyTorch's private operators."""

import pytest
import torch

from ort_accel.optim import multi_tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tensors():
    whole = torch.randn(6, 16)
    kinds = [torch.randn(6, 8), torch.randn(8, 6).t(), whole[:, ::2], torch.randn(()), torch.empty(0), torch.randn(70)]
    return [kind.to(dtype) for dtype in DTYPES for kind in kinds]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_value_in_any_tensor_is_found(bad):
    assert not multi_tensor.has_nonfinite(tensors())
    for index, tensor in enumerate(tensors()):
        given = tensors()
        if tensor.numel():
            given[index].view(-1)[-1:].fill_(bad) if tensor.is_contiguous() else given[index][-1, -1].fill_(bad)
            assert multi_tensor.has_nonfinite(given)


def test_a_check_leaves_finite_values_as_they_are():
    given = [*tensors(), torch.tensor([-0.0, 1e-45, torch.finfo(torch.float32).max])]
    before = [tensor.clone() for tensor in given]
    multi_tensor.has_nonfinite(given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert given[-1].signbit().tolist() == [True, False, False]


def test_unscaling_multiplies_all_layouts_and_types():
    given = tensors()
    wanted = [(tensor.double() * 0.125).to(tensor.dtype) for tensor in given]
    multi_tensor.unscale_(given, 0.125)
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_total_norm_is_that_of_one_long_vector(norm_type):
    given = tensors()
    wanted = torch.linalg.vector_norm(torch.cat([tensor.double().reshape(-1) for tensor in given]), norm_type)
    torch.testing.assert_close(multi_tensor.total_norm(given, norm_type, torch.float64), wanted)


def test_no_tensors_are_finite_and_have_norm_zero():
    assert not multi_tensor.has_nonfinite([])
    assert multi_tensor.total_norm([]) == 0
