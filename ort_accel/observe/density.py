"""`density.inspect`: how much of a training's batches counts, and what computing only that would save."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from ort_accel.observe.batching import SeenBatch, Work, waiting, ways
from ort_accel.observe.density_table import print_density
from ort_accel.observe.logs import speaks
from ort_accel.reporting import InputDensity, Inspection, Report

IGNORED = -100
"""What marks a label that does not count, in PyTorch's losses as in transformers' collators."""

WINDOW = 64
"""The last batches, from whose lengths it is worked out what other batches would compute."""

_INPUTS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""Inputs of tokens, each with the mask that says which count."""


@dataclass(frozen=True)
class Counted:
    """One input of a batch. What counts stays a tensor until it is read: reading makes the host wait for its device."""

    kind: str
    name: str
    pad: int | None
    rows: torch.Tensor
    """How many of each row count."""
    total: int


def counted(batch: Mapping[str, Any], pad: int | None) -> list[Counted]:
    """What counts in each input: by its mask, without one by the id of padding; of labels, what is not ignored."""
    found = []
    for name, mask_name in _INPUTS.items():
        ids, mask = batch.get(name), batch.get(mask_name)
        if _is_grid(mask):
            found.append(Counted("EMBED", name, pad, mask.count_nonzero(dim=1), mask.numel()))
        elif _is_grid(ids):
            counts = torch.ones_like(ids) if pad is None else ids != pad
            found.append(Counted("EMBED", name, pad, counts.count_nonzero(dim=1), ids.numel()))
    labels = batch.get("labels")
    if is_of_tokens(labels):
        found.append(Counted("LABEL", "labels", IGNORED, (labels != IGNORED).count_nonzero(dim=1), labels.numel()))
    return found


def is_of_tokens(labels: Any) -> TypeGuard[torch.Tensor]:
    """True if labels are one for each token, as against classes or figures of a whole text."""
    return _is_grid(labels) and not labels.is_floating_point()


def _is_grid(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.numel() > 0


class DensityInspector:
    """Looks at the batches that a model is trained on, prints the density table every so many of them, and keeps it in
    the report. A step is a batch, also where gradients of several are accumulated."""

    def __init__(self, report: Report, every: int, log_level: str) -> None:
        self._report, self._every, self._is_printed = report, every, speaks(log_level)
        self.is_fed = False
        """Whether a Trainer shows the batches: it knows labels that the model does not get."""
        self._step = 0
        self._rows: list[InputDensity] = []
        self._is_shown = False
        """Whether the rows were in a table, so that a new one begins."""
        self._unread: list[tuple[int, list[Counted]]] = []
        self._seen: deque[SeenBatch] = deque(maxlen=WINDOW)
        self._work: Work | None = None

    def call(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Returns the model is called; in training that is a batch, unless a Trainer shows them."""
        if self.is_fed or not model.training or not torch.is_grad_enabled():
            return
        names = list(inspect.signature(model.forward).parameters)
        self.see(model, {**dict(zip(names, args, strict=False)), **kwargs})

    def see(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Returns the model is about to be trained on a batch."""
        inputs = counted(batch, getattr(getattr(model, "config", None), "pad_token_id", None))
        if not inputs:
            return
        self._work = self._work or work_of(model)
        self._step += 1
        self._unread.append((self._step, inputs))
        if self._step % self._every == 0:
            self.settle()
            self._is_shown = True
            if self._is_printed and self._report.inspection is not None:
                print_density(self._report.inspection)

    def settle(self) -> None:
        """Write into the report what was seen since the last time."""
        if not self._unread or self._work is None:
            return
        if self._is_shown:
            self._rows, self._is_shown = [], False
        for step, inputs in self._unread:
            each = {one.name: one.rows.tolist() for one in inputs}
            self._rows += [
                InputDensity(step, one.kind, one.name, one.pad, sum(each[one.name]), one.total, tuple(each[one.name]))
                for one in inputs
            ]
            self._seen += _seen(inputs, each, len(self._work.token))
        self._unread.clear()
        batches = list(self._seen)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        processes = max(2, torch.distributed.get_world_size() if distributed else 1)
        self._report.inspection = Inspection(
            rows=list(self._rows),
            batches=len(batches),
            ways=ways(batches, self._work) if batches else [],
            processes=processes,
            waiting=waiting(batches, processes),
        )

    def needed(self) -> dict[str, float]:
        """For a line of a log: the share of a dense step's FLOPs that counts, `ort/flops_needed`."""
        found = self._report.inspection.ways if self._report.inspection else []
        return {"ort/flops_needed": found[-1].flops / found[0].flops} if found and found[0].flops else {}


def _seen(inputs: Sequence[Counted], rows: Mapping[str, list[int]], streams: int) -> list[SeenBatch]:
    """Returns the lengths of a batch: those of its inputs, and for a decoder without inputs of its own those of its labels.

    Nothing where the model takes what was not counted, such as pictures.
    """
    chosen = list(inputs[:streams])
    if len(chosen) < streams or chosen[0].kind == "LABEL":
        return []
    widths = [one.total // len(rows[one.name]) for one in chosen]
    lengths = zip(*(rows[one.name] for one in chosen), strict=True)
    labels = sum(sum(rows[one.name]) for one in inputs if one.kind == "LABEL")
    return [SeenBatch(tuple(widths), tuple(lengths), labels)]


def work_of(model: nn.Module) -> Work:
    """Returns a model's FLOPs, estimated from its weights: those within its layers are for each token, that of its head is for
    each token with logits."""
    head = _head(model)
    config = getattr(model, "config", None)
    heads, layers = (getattr(config, name, None) or 0 for name in ("num_attention_heads", "num_hidden_layers"))
    width = heads * (getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0))
    pair = 3.0 * 4 * width  # scores, and their product with the values; and twice that in the backward
    label = _matrix(head) if head is not None else 0.0
    if not getattr(config, "is_encoder_decoder", False):
        return Work((_in_layers(model),), (pair * layers,), label=label)
    decoder = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None) or layers
    tokens = _in_layers(model.get_encoder()), _in_layers(model.get_decoder())  # type: ignore[operator]
    return Work(tokens, (pair * layers, pair * decoder), crossing=pair * decoder, label=label)


def _head(model: nn.Module) -> nn.Module | None:
    """What makes a model's logits of tokens, where it has that."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return head if isinstance(head, nn.Module) else None


def _in_layers(model: nn.Module) -> float:
    """Returns FLOPs of the matrices in a model's lists of layers, for one token."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {module for layers in lists for module in layers.modules() if not isinstance(module, nn.Embedding)}
    return sum(map(_matrix, inside))


def _matrix(module: nn.Module) -> float:
    """Returns two FLOPs of each weight in the forward, two for the gradient of the input, two for that of the weight."""
    total = 0.0
    for weight in module.parameters(recurse=False):
        shape = getattr(weight, "ds_shape", weight.shape)  # of weights that ZeRO-3 has spread, nothing else is here
        if len(shape) == 2:
            total += (6 if weight.requires_grad else 4) * shape.numel()
    return total
