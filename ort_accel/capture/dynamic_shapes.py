"""Settles before a capture what would cause another one: which sizes are dynamic, and a classifier's problem type."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PROBLEM_TYPE = "problem_type"


@dataclass
class ForeseenSizes:
    """Says which sizes of the batches to come will change; known before the first one is there."""

    lengths: bool = False
    """Tokens, masks and labels will have other lengths."""
    batch: bool = False
    """A batch, such as the last of an epoch, will have fewer samples."""

    def add(self, more: ForeseenSizes) -> None:
        """Add what else is known."""
        self.lengths |= more.lengths
        self.batch |= more.batch


class DynamicDims:
    """Marks which dimensions of a call's inputs are dynamic.

    The first shapes are static, unless changes are foreseen. From the second shapes on, the first dimension of every
    input is dynamic, and so is every dimension that was seen to change. If one of these is a length of tokens (the last
    dimension of integers), all lengths are: those of sources and targets may change one after the other. Other
    dimensions, such as those of a picture, stay static: fully dynamic graphs can take minutes to capture.
    """

    def __init__(self, foreseen: ForeseenSizes) -> None:
        self._foreseen = foreseen
        self._first: dict[tuple[int, ...], list[torch.Size]] = {}
        self._dynamic: dict[tuple[int, ...], list[set[int]]] = {}

    def mark(self, tensors: Sequence[Tensor]) -> None:
        """Mark the dynamic dimensions of a call's inputs, for the capture that may follow."""
        ranks = tuple(tensor.ndim for tensor in tensors)
        first_shapes = self._first.setdefault(ranks, [tensor.shape for tensor in tensors])
        changed = [_changed_dims(tensor.shape, first) for tensor, first in zip(tensors, first_shapes, strict=True)]
        if ranks not in self._dynamic:
            if not any(changed) and not self._foreseen.lengths and not self._foreseen.batch:
                return
            self._dynamic[ranks] = [{0} if ndim else set() for ndim in ranks]
            if self._foreseen.lengths:
                self._add_lengths(tensors, self._dynamic[ranks])
        dims_of = self._dynamic[ranks]
        if any(dims and _has_length(tensor) and max(dims) > 0 for tensor, dims in zip(tensors, changed, strict=True)):
            self._add_lengths(tensors, dims_of)
        for tensor, dims, more in zip(tensors, dims_of, changed, strict=True):
            dims |= more
            torch._dynamo.maybe_mark_dynamic(tensor, sorted(dims))

    def _add_lengths(self, tensors: Sequence[Tensor], dims_of: Sequence[set[int]]) -> None:
        """Add each length of tokens, and dimensions of other inputs, such as embeddings, that are as long."""
        lengths = {tensor.shape[-1] for tensor in tensors if _has_length(tensor)}
        for tensor, dims in zip(tensors, dims_of, strict=True):
            if _has_length(tensor):
                dims.add(tensor.ndim - 1)
            else:
                dims.update(dim for dim in range(1, tensor.ndim) if tensor.shape[dim] in lengths)


def _changed_dims(shape: torch.Size, first: torch.Size) -> set[int]:
    return {dim for dim, (size, before) in enumerate(zip(shape, first, strict=True)) if size != before}


def _has_length(tensor: Tensor) -> bool:
    return tensor.ndim >= 2 and not tensor.is_floating_point() and not tensor.is_complex()


def settle_problem_type(model: nn.Module, labels: Tensor) -> None:
    """Write the problem type of these labels into a model's configuration, if the model itself would write it.

    A classifier of transformers does so in its first call. The graph of that call would hold for it only, and
    everything would be compiled a second time.
    """
    config = getattr(model, "config", None)
    if config is None or getattr(config, PROBLEM_TYPE, "") is not None:
        return
    same_config = (module for module in model.modules() if getattr(module, "config", None) is config)
    if any(map(_writes_problem_type, same_config)):  # the model, or one that an adapter wraps
        setattr(config, PROBLEM_TYPE, _problem_type(config, labels))


def _writes_problem_type(module: nn.Module) -> bool:
    """True if `forward`, or the loss function that transformers gives the module, writes the field."""
    code = _code(type(module).forward)
    if code is None:
        return False
    if "loss_function" in code.co_names:
        code = _code(getattr(module, "loss_function", None))
    return code is not None and any(
        step.opname == "STORE_ATTR" and step.argval == PROBLEM_TYPE for step in dis.get_instructions(code)
    )


def _code(function: object) -> CodeType | None:
    found = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return found if isinstance(found, CodeType) else None


def _problem_type(config: PretrainedConfig, labels: Tensor) -> str:
    if config.num_labels == 1:
        return "regression"
    is_class_index = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if is_class_index else "multi_label_classification"
