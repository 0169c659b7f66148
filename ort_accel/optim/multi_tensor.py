"""Operations on many tensors at once, by PyTorch's private multi-tensor operators.

Checked on torch 2.13: `_amp_foreach_non_finite_check_and_unscale_`, `_foreach_norm`, `_foreach_mul_`,
`_foreach_copy_`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def unscale_(tensors: Iterable[Tensor], factor: float | Tensor) -> Tensor:
    """Multiply tensors by a factor in place. Returns a bool tensor: true if a value was infinite or NaN."""
    flags = []
    for device, group in _by_device_and_type(tensors):
        flag = torch.zeros(1, device=device)
        by = torch.as_tensor(factor, dtype=torch.float32, device=device).reshape(1)
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, by)
        flags.append(flag)
    return _any(flags)


def has_nonfinite(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a bool tensor: true if a value is infinite or NaN. Finite values do not change."""
    return unscale_(tensors, 1.0)


@torch.no_grad()
def norms(tensors: Iterable[Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Returns the norm of each tensor that has elements, computed in `dtype`."""
    found: list[Tensor] = []
    for _, group in _by_device_and_type(tensors):
        found += torch._foreach_norm(group, norm_type, dtype)
    return found


@torch.no_grad()
def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the norm of all tensors as one vector, on the device of the first."""
    each = norms(tensors, norm_type, dtype)
    if not each:
        return torch.zeros((), dtype=dtype or torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(each[0].device) for norm in each]), norm_type)
    return total


@torch.no_grad()
def multiply_(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a factor in place."""
    for device, group in _by_device_and_type(tensors):
        torch._foreach_mul_(group, factor.to(device))


@torch.no_grad()
def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, and convert types that differ."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _by_device_and_type(tensors: Iterable[Tensor]) -> Iterable[tuple[torch.device, list[Tensor]]]:
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            groups[tensor.device, tensor.dtype].append(tensor)
    return [(device, group) for (device, _), group in groups.items()]


def _any(flags: list[Tensor]) -> Tensor:
    if not flags:
        return torch.zeros((), dtype=torch.bool)
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()
