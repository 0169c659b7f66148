"""`data.packing` in a Trainer: its training set in packed rows, for models that keep the sequences of a row apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    default_data_collator,
)

from ort_accel.config import Config
from ort_accel.data import PackedDataset, PackingCollator
from ort_accel.errors import OrtAccelError, in_a_line
from ort_accel.hf.load_balancing import lengths_of
from ort_accel.reporting.report import Report
from ort_accel.zero3 import is_partitioned

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

FEATURE = "data.packing"
PROBE_LENGTHS = 5, 6
"""The tokens of the two sequences that a model is checked with."""
POSITION_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""The share of its largest result by which a sequence may differ in a row and alone, by the type of the weights."""
POSITION_TOLERANCE_16_BITS = 0.05


@contextmanager
def packed_training_set(trainer: Trainer, config: Config) -> Iterator[None]:
    """Gives a Trainer packed rows in place of its training set and its collator, while it builds its data loader.

    Raises for a model that would let the sequences of a row meet, whoever packs them.
    """
    packing, collator = config.data.packing, trainer.data_collator
    dataset: Any = trainer.train_dataset
    assert trainer.model is not None
    if packing is None and (not _flattens(collator) or is_partitioned(trainer.model)):
        yield
        return
    if (why := why_not_packed(trainer.model, getattr(collator, "position_ids_start", 0))) is not None:
        who = FEATURE if packing is not None else f"the {type(collator).__name__}"
        raise OrtAccelError(f"{who} packs several sequences into a row, and in this model {why}; train it unpacked")
    if packing is None:
        yield
        return
    _refuse_collator(collator)
    if not hasattr(dataset, "__len__"):
        kind = type(dataset).__name__
        raise OrtAccelError(f"{FEATURE} needs a dataset with a length, and the training set is of type {kind}")
    lengths = lengths_of(dataset, trainer, FEATURE)
    trainer.train_dataset = PackedDataset(dataset, packing.max_length, lengths)
    trainer.data_collator = PackingCollator(None if packing.flatten else packing.max_length, _pad_token(trainer))
    try:
        yield
    finally:
        trainer.train_dataset, trainer.data_collator = dataset, collator


def record_packing(report: Report, config: Config, loader: object) -> None:
    """Reports how full the rows are. Raises if packing is configured and the data loader has other samples."""
    if config.data.packing is None:
        return
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    if not isinstance(dataset, PackedDataset):
        raise OrtAccelError(
            f"{FEATURE} is set, but the training data loader has no packed rows; leave the Trainer's "
            "get_train_dataloader as it is, or remove the key"
        )
    rows, samples, room = len(dataset), sum(map(len, dataset.rows)), len(dataset) * config.data.packing.max_length
    filled = dataset.tokens / max(room, 1)
    report.applied(FEATURE, f"{samples} samples in {rows} rows of {config.data.packing.max_length}, {filled:.1%} full")


def _flattens(collator: object) -> bool:
    """True for the collators of transformers and TRL that make one row of a batch."""
    return isinstance(collator, DataCollatorWithFlattening) or getattr(collator, "padding_free", False) is True


def _refuse_collator(collator: object) -> None:
    """Raises for a collator that does more than padding, since packing takes its place."""
    pads = isinstance(collator, DataCollatorWithPadding | DataCollatorForSeq2Seq) or collator is default_data_collator
    is_causal = isinstance(collator, DataCollatorForLanguageModeling) and not collator.mlm
    if not (pads or is_causal or getattr(collator, "padding_free", None) is False):
        raise OrtAccelError(
            f"{FEATURE} makes the batches, and this Trainer has a {type(collator).__name__}; remove one of the two"
        )


def _pad_token(trainer: Trainer) -> int:
    return getattr(trainer.processing_class, "pad_token_id", None) or 0


def why_not_packed(model: nn.Module, first_position: int = 0) -> str | None:
    """Returns how sequences of a packed row meet in a model; None if each gives what it gives alone.

    The model runs a few tokens in eager mode. Another first sequence must not change a bit of the second one's results.
    """
    if "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", "")):
        return None  # its kernels take the boundaries of sequences
    if is_partitioned(model):
        return "that cannot be checked: ZeRO stage 3 holds its weights"
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = _changes_in_evaluation(module)
        with torch.no_grad():
            return _why_not_packed(model, first_position)
    except Exception as error:  # a model without positions or token ids
        return f"rows with position_ids fail ({in_a_line(error)})"
    finally:
        for module, mode in modes.items():
            module.training = mode


def _changes_in_evaluation(module: nn.Module) -> bool:
    """True for layers of bitsandbytes: evaluated on some CPUs, one of 4 bits keeps a form that has no gradient."""
    return type(module).__module__.startswith("bitsandbytes.")


def _why_not_packed(model: nn.Module, first_position: int) -> str | None:
    weight = cast("nn.Embedding", cast("PreTrainedModel", model).get_input_embeddings()).weight
    first, second = PROBE_LENGTHS
    tokens = torch.arange(3, 3 + first + second, device=weight.device) % weight.shape[0]
    positions = torch.cat([torch.arange(length, device=weight.device) for length in PROBE_LENGTHS]) + first_position

    def results(row: Tensor, **named: Tensor) -> Tensor:
        found = model.forward(input_ids=row[None], **named)
        return cast("Tensor", found.logits if hasattr(found, "logits") else found[0])[0]

    row = results(tokens, position_ids=positions[None])
    other = results(torch.cat([tokens[:first].flip(0), tokens[first:]]), position_ids=positions[None])
    if len(row) != first + second or not torch.equal(row[first:], other[first:]):
        return "a sequence depends on the sequences before it in the row"
    alone = results(tokens[first:])
    most = POSITION_TOLERANCE.get(row.dtype, POSITION_TOLERANCE_16_BITS) * float(alone.abs().max())
    if float((row[first:] - alone).abs().max()) > most:
        return f"positions do not begin with {first_position}"
    return None
