"""Operations on many tensors at once. The only file that calls PyTorch's private multi-tensor operators for them.

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
    """Multiply tensors by a factor in place. Returns whether a value was infinite or not a number, as a bool tensor.

    One operator for all tensors of a device and type; nothing waits for the device.
    """
    flags = []
    for device, group in _by_device_and_type(tensors):
        flag = torch.zeros(1, device=device)
        by = torch.as_tensor(factor, dtype=torch.float32, device=device).reshape(1)
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, by)
        flags.append(flag)
    return _any(flags)


def has_nonfinite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether a value is infinite or not a number, as a bool tensor. Finite values stay as they are, to the bit."""
    return unscale_(tensors, 1.0)


@torch.no_grad()
def norms(tensors: Iterable[Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norm of each tensor, computed in `dtype`; tensors without elements have none."""
    found: list[Tensor] = []
    for _, group in _by_device_and_type(tensors):
        found += torch._foreach_norm(group, norm_type, dtype)
    return found


@torch.no_grad()
def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
    """The norm of all tensors taken as one vector, on the device of the first."""
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
    """Copy each source into its target, with a change of type where they differ."""
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
