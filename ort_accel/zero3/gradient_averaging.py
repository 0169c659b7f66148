"""Averaging of gradients by an all-to-all where gloo connects the processes; its own reduce-scatter is slower."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ort_accel.zero3.deepspeed_interfaces import (
    AVERAGE_METHOD,
    REDUCE_SCATTER,
    ZeroOptimizer,
    averaging_module,
    mangled,
)

ReduceScatter = Callable[[list[Tensor], dist.ProcessGroup | None], list[Tensor]]


class GradientAveraging:
    """Lets one DeepSpeed optimizer average its gradients by `average_parts`."""

    def __init__(self, zero: ZeroOptimizer) -> None:
        self._zero, self._module = zero, averaging_module(zero)
        self._method_name = mangled(zero, AVERAGE_METHOD)
        self._method = getattr(zero, self._method_name)
        self._reduce_scatter = getattr(self._module, REDUCE_SCATTER)
        setattr(zero, self._method_name, self._average)

    def undo(self) -> None:
        """Give the optimizer its own method back."""
        delattr(self._zero, self._method_name)

    def _average(self, *args: object, **kwargs: object) -> object:
        # The module's function is replaced during this call only: other optimizers keep DeepSpeed's.
        setattr(self._module, REDUCE_SCATTER, partial(average_parts, self._reduce_scatter))
        try:
            return self._method(*args, **kwargs)
        finally:
            setattr(self._module, REDUCE_SCATTER, self._reduce_scatter)


@torch.no_grad()
def average_parts(
    reduce_scatter: ReduceScatter, gradients: list[Tensor], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Returns this process's part of each gradient, averaged over all processes of the group."""
    processes = dist.get_world_size(group)
    if processes == 1 or dist.get_backend(group) != "gloo":
        return reduce_scatter(gradients, group)
    sizes = [-(-g.numel() // processes) for g in gradients]
    outgoing = torch.cat(
        [
            functional.pad(g.view(-1), (0, size * processes - g.numel())).view(processes, size)
            for g, size in zip(gradients, sizes, strict=True)
        ],
        dim=1,
    )
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    rank = dist.get_rank(group)
    return [
        part[: max(g.numel() - rank * size, 0)]
        for part, g, size in zip(torch.split(incoming.mean(0), sizes), gradients, sizes, strict=True)
    ]
