"""The models and batches that steps are measured on, built from a size; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch
import transformers as hf
from torch import nn

Batch = dict[str, torch.Tensor]

CLASSES = 4
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
"""The experts of a layer, and those of a token; each expert is twice as wide as the model."""
PATCH_PIXELS = 16
MASKED_SHARE = 0.15
"""The share of tokens with a label, in masked language modelling."""
SHARE_VARIATION = 0.1
"""The largest relative difference of a batch's shares of tokens and labels from the wanted ones."""
IGNORED = -100
"""The label of a token that has none."""


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
    density: float = 1.0
    """The share of tokens that are not padding."""
    labelled: float | None = None
    """The share of all tokens that have a label; None is what is usual for the model."""
    checkpointing: bool = False
    """True if the model recomputes its layers in the backward, by transformers' gradient checkpointing."""

    def __str__(self) -> str:
        size = f"{self.layers} layers of {self.hidden}, {self.heads} heads, batch {self.batch} x {self.length}"
        shares = f", {self.density:.0%} of the tokens valid" if self.density < 1 else ""
        shares += f", {self.labelled:.0%} labelled" if self.labelled is not None else ""
        again = ", gradient checkpointing" if self.checkpointing else ""
        numbers = f"vocabulary {self.vocab:,}, dropout {self.dropout:g}, {self.precision}"
        return f"{self.model}: {size}, {numbers}{shares}{again}"


def build(workload: Workload) -> nn.Module:
    """Returns the model, with random weights from a fixed seed, in training mode."""
    torch.manual_seed(0)
    model: Any = MODELS[workload.model][0](workload)
    if workload.checkpointing:
        model.gradient_checkpointing_enable()
    trained: nn.Module = model.train()
    return trained


def batch_of(workload: Workload, number: int = 0) -> Batch:
    """Returns a batch from a fixed seed. Its rows differ in length unless all tokens are valid.

    The first batch has the wanted shares of tokens and labels. Those of others differ by up to `SHARE_VARIATION`, as in
    a training, so that a cache keyed by sizes gains nothing by meeting one batch again and again.
    """
    generator = torch.Generator().manual_seed(1 + number)
    return MODELS[workload.model][1](_varied(workload, number), generator)


def _varied(workload: Workload, number: int) -> Workload:
    """Returns the workload with one of thirteen shares that are evenly spread around the wanted one."""
    share = 1 + SHARE_VARIATION * ((7 * number + 6) % 13 / 6 - 1)
    density = min(1.0, workload.density * share) if workload.density < 1 else 1.0
    labelled = None if workload.labelled is None else min(density, workload.labelled * share)
    return replace(workload, density=density, labelled=labelled)


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


def _decoder(size: Workload) -> dict[str, Any]:
    """Returns the arguments that the configurations of decoders share."""
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads or size.heads,
        "max_position_embeddings": max(512, size.length),
        "attention_dropout": size.dropout,
        "use_cache": False,
    }


def _llama(size: Workload) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_decoder(size), intermediate_size=4 * size.hidden))


def _qwen3_moe(size: Workload) -> nn.Module:
    config = hf.Qwen3MoeConfig(
        **_decoder(size),
        moe_intermediate_size=2 * size.hidden,
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
    )
    return hf.Qwen3MoeForCausalLM(config)


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
        patch_size=PATCH_PIXELS,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
    )
    config.num_labels = CLASSES
    return hf.ViTForImageClassification(config)


def _side(size: Workload) -> int:
    """Returns the side of a square image with about as many patches as a text would have tokens."""
    return PATCH_PIXELS * isqrt(size.length)


def _ids(size: Workload, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, size.vocab, (size.batch, size.length), generator=generator)


def _classes(size: Workload, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, CLASSES, (size.batch,), generator=generator)


def _lengths(size: Workload) -> torch.Tensor:
    """Returns the tokens of each row: evenly spread around the wanted share, which all rows have together."""
    spread = min(0.8, 1 / size.density - 1) if size.batch > 1 else 0.0
    shares = size.density * torch.linspace(1 - spread, 1 + spread, size.batch, dtype=torch.float64)
    ends = (shares.cumsum(0) * size.length).round().long()
    return ends.diff(prepend=ends.new_zeros(1)).clamp(1, size.length)


def _mask(size: Workload) -> torch.Tensor:
    return (torch.arange(size.length) < _lengths(size)[:, None]).long()


def _padded(size: Workload, generator: torch.Generator) -> tuple[torch.Tensor, Batch]:
    """Returns the token ids before padding, and the batch with the padded ids and the mask."""
    ids, mask = _ids(size, generator), _mask(size)
    return ids, {"input_ids": ids * mask, "attention_mask": mask}


def _classified(size: Workload, generator: torch.Generator) -> Batch:
    return {**_padded(size, generator)[1], "labels": _classes(size, generator)}


def _masked(size: Workload, generator: torch.Generator) -> Batch:
    ids, batch = _padded(size, generator)
    share = MASKED_SHARE if size.labelled is None else size.labelled / size.density
    wanted = round(share * int(batch["attention_mask"].sum()))
    chances = torch.rand(ids.shape, generator=generator) * batch["attention_mask"]
    kept = torch.zeros_like(ids).flatten().index_fill(0, chances.flatten().topk(wanted).indices, 1).view_as(ids)
    return {**batch, "labels": ids.masked_fill(kept == 0, IGNORED)}


def _causal(size: Workload, generator: torch.Generator) -> Batch:
    """Returns a batch whose rows end with the labelled tokens, as answers follow prompts."""
    ids, batch = _padded(size, generator)
    share = 1.0 if size.labelled is None else size.labelled / size.density
    lengths = _lengths(size)[:, None]
    begins = lengths - (lengths * share).round().long()
    places = torch.arange(size.length)
    return {**batch, "labels": ids.masked_fill((places < begins) | (places >= lengths), IGNORED)}


def _sequence_to_sequence(size: Workload, generator: torch.Generator) -> Batch:
    return {**_padded(size, generator)[1], "labels": _ids(size, generator)}


def _images(size: Workload, generator: torch.Generator) -> Batch:
    pixels = torch.randn(size.batch, 3, _side(size), _side(size), generator=generator)
    return {"pixel_values": pixels, "labels": _classes(size, generator)}


MODELS: dict[str, tuple[Callable[[Workload], nn.Module], Callable[[Workload, torch.Generator], Batch]]] = {
    "bert": (lambda size: hf.BertForSequenceClassification(_bert_config(size)), _classified),
    "bert-mlm": (lambda size: hf.BertForMaskedLM(_bert_config(size)), _masked),
    "gpt2": (_gpt2, _causal),
    "llama": (_llama, _causal),
    "qwen3-moe": (_qwen3_moe, _causal),
    "t5": (_t5, _sequence_to_sequence),
    "vit": (_vit, _images),
}
"""By name: the functions that build the model and its batch."""
