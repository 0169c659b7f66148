"""Tells powers that are a few products and quotients from powers that need a logarithm.

For the latter, ONNX Runtime's kernel calls the C library number by number, and PyTorch's kernel is vectorized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

SHORT = (1, 2, 3, -1, -2, 0.5, -0.5)
"""Exponents for which `pow_scalar` (`ops/arithmetic.py`) emits no `Pow` in single precision."""

_POWERS = {aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar}


def is_long_power(node: fx.Node) -> bool:
    """True if a node raises to a power that needs a logarithm."""
    if node.target not in _POWERS:
        return False
    exponent: Any = node.args[1]
    return node.target is not aten.pow.Tensor_Scalar or exponent not in SHORT
