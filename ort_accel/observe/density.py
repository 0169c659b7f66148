"""`density.inspect`: the valid share of a training's batches, and the FLOPs that skipping the rest would save."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import nn

from ort_accel.observe.batching import SeenBatch, Work, schemes, waiting
from ort_accel.observe.density_table import print_density
from ort_accel.observe.logs import speaks
from ort_accel.reporting.batches import InputDensity, Inspection
from ort_accel.reporting.report import Report

IGNORED = -100
"""The label that PyTorch's losses and transformers' collators ignore."""

WINDOW_BATCHES = 64
"""The number of last batches whose lengths other batching schemes are estimated from."""

_INPUTS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""Inputs of tokens, each with its mask of valid tokens."""


@dataclass(frozen=True)
class CountedInput:
    """One input of a batch. Its counts stay a tensor until they are read, since reading waits for the device."""

    kind: str
    name: str
    pad: int | None
    rows: torch.Tensor
    """The number of valid tokens in each row."""
    total: int


def count_inputs(batch: Mapping[str, object], pad: int | None) -> list[CountedInput]:
    """Count the valid tokens of each input, by its mask or else by the id of padding, and the labels not ignored."""
    found = []
    for name, mask_name in _INPUTS.items():
        ids, mask = batch.get(name), batch.get(mask_name)
        if _is_grid(mask):
            found.append(CountedInput("EMBED", name, pad, mask.count_nonzero(dim=1), mask.numel()))
        elif _is_grid(ids):
            counts = torch.ones_like(ids) if pad is None else ids != pad
            found.append(CountedInput("EMBED", name, pad, counts.count_nonzero(dim=1), ids.numel()))
    labels = batch.get("labels")
    if is_of_tokens(labels):
        found.append(CountedInput("LABEL", "labels", IGNORED, (labels != IGNORED).count_nonzero(dim=1), labels.numel()))
    return found


def is_of_tokens(labels: object) -> TypeGuard[torch.Tensor]:
    """True if there is a label for each token, rather than one for each text."""
    return _is_grid(labels) and not labels.is_floating_point()


def _is_grid(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.numel() > 0


class DensityInspector:
    """Inspects the batches that a model is trained on, prints the density table every `every` batches, and records it.

    A step is a batch, also where gradients are accumulated over several.
    """

    def __init__(self, report: Report, every: int, log_level: str) -> None:
        self._report, self._every, self._is_printed = report, every, speaks(log_level)
        self.is_fed = False
        """True if a Trainer passes the batches: it knows labels that the model does not get."""
        self._step = 0
        self._rows: list[InputDensity] = []
        self._is_shown = False
        """True if the rows were printed, so that a new table begins."""
        self._pending: list[tuple[int, list[CountedInput]]] = []
        self._seen: deque[SeenBatch] = deque(maxlen=WINDOW_BATCHES)
        self._work: Work | None = None

    def call(self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Inspect a call of the model in training, unless a Trainer passes the batches."""
        if self.is_fed or not model.training or not torch.is_grad_enabled():
            return
        names = list(inspect.signature(model.forward).parameters)
        self.see(model, {**dict(zip(names, args, strict=False)), **kwargs})

    def see(self, model: nn.Module, batch: Mapping[str, object]) -> None:
        """Inspect a batch that the model is about to be trained on."""
        inputs = count_inputs(batch, getattr(getattr(model, "config", None), "pad_token_id", None))
        if not inputs:
            return
        self._work = self._work or work_of(model)
        self._step += 1
        self._pending.append((self._step, inputs))
        if self._step % self._every == 0:
            self.settle()
            self._is_shown = True
            if self._is_printed and self._report.inspection is not None:
                print_density(self._report.inspection)

    def settle(self) -> None:
        """Write the batches since the last call into the report."""
        if not self._pending or self._work is None:
            return
        if self._is_shown:
            self._rows, self._is_shown = [], False
        for step, inputs in self._pending:
            each = {one.name: one.rows.tolist() for one in inputs}
            self._rows += [
                InputDensity(step, one.kind, one.name, one.pad, sum(each[one.name]), one.total, tuple(each[one.name]))
                for one in inputs
            ]
            self._seen += _seen(inputs, each, len(self._work.token))
        self._pending.clear()
        batches = list(self._seen)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        processes = max(2, torch.distributed.get_world_size() if distributed else 1)
        self._report.inspection = Inspection(
            rows=list(self._rows),
            batches=len(batches),
            ways=schemes(batches, self._work) if batches else [],
            processes=processes,
            waiting=waiting(batches, processes),
        )

    def needed(self) -> dict[str, float]:
        """Returns the share of a dense step's FLOPs that is needed, as the log's `ort/flops_needed`."""
        found = self._report.inspection.ways if self._report.inspection else []
        return {"ort/flops_needed": found[-1].flops / found[0].flops} if found and found[0].flops else {}


def _seen(inputs: Sequence[CountedInput], rows: Mapping[str, list[int]], streams: int) -> list[SeenBatch]:
    """Returns the lengths of a batch, those of its labels without other inputs; empty if an input was not counted."""
    chosen = list(inputs[:streams])
    if len(chosen) < streams or chosen[0].kind == "LABEL":
        return []
    widths = [one.total // len(rows[one.name]) for one in chosen]
    lengths = zip(*(rows[one.name] for one in chosen), strict=True)
    labels = sum(sum(rows[one.name]) for one in inputs if one.kind == "LABEL")
    return [SeenBatch(tuple(widths), tuple(lengths), labels)]


def work_of(model: nn.Module) -> Work:
    """Estimate a model's FLOPs from its weights: its layers' for each token, its head's for each logit row."""
    head = _head(model)
    config = getattr(model, "config", None)
    heads, layers = (getattr(config, name, None) or 0 for name in ("num_attention_heads", "num_hidden_layers"))
    width = heads * (getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0))
    pair = 3.0 * 4 * width  # scores and their product with the values, and twice that in the backward
    label = _matrix(head) if head is not None else 0.0
    if not getattr(config, "is_encoder_decoder", False):
        return Work((_in_layers(model),), (pair * layers,), label=label)
    decoder = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None) or layers
    tokens = _in_layers(model.get_encoder()), _in_layers(model.get_decoder())  # type: ignore[operator]
    return Work(tokens, (pair * layers, pair * decoder), cross=pair * decoder, label=label)


def _head(model: nn.Module) -> nn.Module | None:
    """Returns the module that computes a model's logits of tokens; None if it has none."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return head if isinstance(head, nn.Module) else None


def _in_layers(model: nn.Module) -> float:
    """Returns the FLOPs of the matrices in a model's lists of layers, for one token."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {module for layers in lists for module in layers.modules() if not isinstance(module, nn.Embedding)}
    return sum(map(_matrix, inside))


def _matrix(module: nn.Module) -> float:
    """Count two FLOPs of each weight in the forward, two for the input's gradient, and two for the weight's."""
    total = 0.0
    for weight in module.parameters(recurse=False):
        shape = getattr(weight, "ds_shape", weight.shape)  # ZeRO-3 leaves a partitioned weight no other shape
        if len(shape) == 2:
            total += (6 if weight.requires_grad else 4) * shape.numel()
    return total
