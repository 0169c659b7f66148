"""The operator of RMS norms has gradients, which have gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ort_accel.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("weighted", [True, False])
def test_the_gradients_have_gradients(weighted: bool) -> None:
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    weight = torch.randn(4, dtype=torch.double, requires_grad=True) if weighted else None

    def norm(*given: Tensor) -> Tensor:
        return rms_norm(given[0], given[1] if weighted else None, 1e-5)

    operands = (x, weight) if weight is not None else (x,)
    assert torch.autograd.gradcheck(norm, operands)
    assert torch.autograd.gradgradcheck(norm, operands)
