"""Powers that are a few short operations, and powers that need a logarithm.

PyTorch and our lowerings multiply and divide for a list of exponents. For all others, ONNX Runtime's kernel calls the C
library for each number, where PyTorch's kernel computes as many at once as a register holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

SHORT_EXPONENTS = (1, 2, 3, -1, -2, 0.5, -0.5)
"""Exponents for which `pow_scalar` (`lowering/ops/arithmetic.py`) writes no `Pow` in single precision."""

_POWERS = {aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar}


def is_long_power(node: fx.Node) -> bool:
    """True if a node raises to a power that is none of the short ones."""
    if node.target not in _POWERS:
        return False
    exponent: Any = node.args[1]
    return node.target is not aten.pow.Tensor_Scalar or exponent not in SHORT_EXPONENTS
