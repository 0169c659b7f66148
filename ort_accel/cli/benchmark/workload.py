"""The models and batches that steps are measured on, built from a size; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
import transformers as hf
from torch import nn

Batch = dict[str, Any]

CLASSES = 4
PATCH = 16
MASKED = 0.15
"""The share of tokens with a label, in masked language modelling."""


@dataclass(frozen=True)
class Workload:
    """One model at one size, and its batch."""

    model: str = "bert"
    hidden: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int | None = None
    """Heads of keys and values where a model can have fewer of them; None is as many as `heads`."""
    batch: int = 8
    length: int = 128
    vocab: int = 8000
    dropout: float = 0.0
    precision: str = "fp32"

    def __str__(self) -> str:
        size = f"{self.layers} layers of {self.hidden}, {self.heads} heads, batch {self.batch} x {self.length}"
        return f"{self.model}: {size}, vocabulary {self.vocab:,}, dropout {self.dropout:g}, {self.precision}"


def build(workload: Workload) -> nn.Module:
    """The model, with random weights from a fixed seed, in training mode."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[workload.model][0](workload)
    return model.train()


def batch_of(workload: Workload) -> Batch:
    """A dense batch, from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    return MODELS[workload.model][1](workload, generator)


def _bert_config(size: Workload) -> hf.BertConfig:
    config = hf.BertConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=max(512, size.length),
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        classifier_dropout=size.dropout,
    )
    config.num_labels = CLASSES
    return config


def _gpt2(size: Workload) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=size.vocab,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=max(512, size.length),
        resid_pdrop=size.dropout,
        embd_pdrop=size.dropout,
        attn_pdrop=size.dropout,
        use_cache=False,
    )
    return hf.GPT2LMHeadModel(config)


def _llama(size: Workload) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads or size.heads,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=max(512, size.length),
        attention_dropout=size.dropout,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config)


def _t5(size: Workload) -> nn.Module:
    config = hf.T5Config(
        vocab_size=size.vocab,
        d_model=size.hidden,
        d_kv=size.hidden // size.heads,
        d_ff=4 * size.hidden,
        num_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=size.dropout,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration(config)


def _vit(size: Workload) -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        image_size=_side(size),
        patch_size=PATCH,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
    )
    config.num_labels = CLASSES
    return hf.ViTForImageClassification(config)


def _side(size: Workload) -> int:
    """The side of a square image with about as many patches as a text would have tokens."""
    return PATCH * isqrt(size.length)


def _ids(size: Workload, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, size.vocab, (size.batch, size.length), generator=generator)


def _classes(size: Workload, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, CLASSES, (size.batch,), generator=generator)


def _classified(size: Workload, generator: torch.Generator) -> Batch:
    ids = _ids(size, generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _classes(size, generator)}


def _masked(size: Workload, generator: torch.Generator) -> Batch:
    ids = _ids(size, generator)
    kept = torch.rand(ids.shape, generator=generator) < MASKED
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(~kept, -100)}


def _causal(size: Workload, generator: torch.Generator) -> Batch:
    ids = _ids(size, generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _sequence_to_sequence(size: Workload, generator: torch.Generator) -> Batch:
    ids = _ids(size, generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _ids(size, generator)}


def _images(size: Workload, generator: torch.Generator) -> Batch:
    pixels = torch.randn(size.batch, 3, _side(size), _side(size), generator=generator)
    return {"pixel_values": pixels, "labels": _classes(size, generator)}


MODELS: dict[str, tuple[Callable[[Workload], nn.Module], Callable[[Workload, torch.Generator], Batch]]] = {
    "bert": (lambda size: hf.BertForSequenceClassification(_bert_config(size)), _classified),
    "bert-mlm": (lambda size: hf.BertForMaskedLM(_bert_config(size)), _masked),
    "gpt2": (_gpt2, _causal),
    "llama": (_llama, _causal),
    "t5": (_t5, _sequence_to_sequence),
    "vit": (_vit, _images),
}
"""By name: how to make the model, and its batch."""
