"""Which powers are a few short operations, and which need a logarithm.

PyTorch computes those of a list of exponents by multiplying and dividing, and so do we. For all others, ONNX Runtime's
kernel calls the C library number by number, where PyTorch's computes as many at once as a register holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

SHORT = (1, 2, 3, -1, -2, 0.5, -0.5)
"""Exponents, for which `pow_scalar` (`ops/arithmetic.py`) writes no kernel of powers in single precision."""

_POWERS = {aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar}


def is_long_power(node: fx.Node) -> bool:
    """Whether a node raises to a power that is none of the short ones."""
    if node.target not in _POWERS:
        return False
    exponent: Any = node.args[1]
    return node.target is not aten.pow.Tensor_Scalar or exponent not in SHORT
