"""Which sizes of a model's inputs are kept open when something is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Foreseen:
    """What is known of the batches to come before the first one is there."""

    lengths: bool = False
    """Their tokens, masks and labels will have other lengths."""
    batch: bool = False
    """One of them, such as the last of an epoch, will have fewer samples."""

    def add(self, more: Foreseen) -> None:
        """Take up what else is known."""
        self.lengths |= more.lengths
        self.batch |= more.batch


class OpenSizes:
    """Which sizes of the inputs of a call are kept open.

    The first shapes are taken for fixed, unless others are foreseen. From the second on, the first dimension of every
    input is open, since the last batch is often a smaller one, and so is every dimension that was seen to change. Where
    that was a length of tokens (the last dimension of whole numbers), all of these are open: the lengths of sources and
    targets may happen to change one after the other. Other sizes (of a picture, say) stay fixed: graphs with everything
    open can take minutes to capture.
    """

    def __init__(self, foreseen: Foreseen) -> None:
        self._foreseen = foreseen
        self._first: dict[tuple[int, ...], list[torch.Size]] = {}
        self._open: dict[tuple[int, ...], list[set[int]]] = {}

    def mark(self, tensors: Sequence[torch.Tensor]) -> None:
        """Mark what is open in the inputs of a call, for the capture that may follow."""
        ranks = tuple(tensor.ndim for tensor in tensors)
        first_shapes = self._first.setdefault(ranks, [tensor.shape for tensor in tensors])
        changed = [_changed(tensor.shape, first) for tensor, first in zip(tensors, first_shapes, strict=True)]
        if ranks not in self._open:
            if not any(changed) and not self._foreseen.lengths and not self._foreseen.batch:
                return
            self._open[ranks] = [{0} if ndim else set() for ndim in ranks]
            if self._foreseen.lengths:
                self._open_lengths(tensors, self._open[ranks])
        dims_of = self._open[ranks]
        if any(dims and _has_length(tensor) and max(dims) > 0 for tensor, dims in zip(tensors, changed, strict=True)):
            self._open_lengths(tensors, dims_of)
        for tensor, dims, more in zip(tensors, dims_of, changed, strict=True):
            dims |= more
            torch._dynamo.maybe_mark_dynamic(tensor, sorted(dims))

    def _open_lengths(self, tensors: Sequence[torch.Tensor], dims_of: Sequence[set[int]]) -> None:
        """Open each length of tokens, and in other inputs, such as embeddings, what is as long."""
        lengths = {tensor.shape[-1] for tensor in tensors if _has_length(tensor)}
        for tensor, dims in zip(tensors, dims_of, strict=True):
            if _has_length(tensor):
                dims.add(tensor.ndim - 1)
            else:
                dims.update(dim for dim in range(1, tensor.ndim) if tensor.shape[dim] in lengths)


def _changed(shape: torch.Size, first: torch.Size) -> set[int]:
    return {dim for dim, (size, before) in enumerate(zip(shape, first, strict=True)) if size != before}


def _has_length(tensor: torch.Tensor) -> bool:
    return tensor.ndim >= 2 and not tensor.is_floating_point() and not tensor.is_complex()
