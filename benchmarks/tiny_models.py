"""Tiny random models of every architecture that transformers can train, and batches for them. Nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

VOCABULARY, CLASSES, SIDE = 64, 3, 32
MOST_PARAMETERS = 20_000_000

Batch = dict[str, Any]

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "decoder_start_token_id": 1,
    "forced_bos_token_id": None,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "seq_length": 64,
    "max_seq_len": 64,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "dim": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "n_inner": 48,
    "d_ff": 48,
    "ffn_dim": 48,
    "hidden_dim": 48,
    "ffn_hidden_size": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_kv": 8,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 6,
    "image_size": SIDE,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "type_vocab_size": 2,
    "attention_window": 4,
    "block_size": 4,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "state_size": 8,
    "use_cache": False,
}
"""What makes a model tiny: each configuration takes the names that it has."""

OTHERWISE: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4}, {"attention_dropout": 0.0})
"""What is tried after that, for models that do not have some of it."""

OF_KIND: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "convnext": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 4},
    "convnextv2": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 4},
    "distilbert": {"hidden_dim": 48},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "segformer": {"hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 2, 2, 4]},
    "swin": {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 2},
    "swinv2": {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 2},
}
"""What single models call otherwise, or demand."""

PARTS = ("text_config", "vision_config", "encoder_config", "decoder_config", "audio_config")


@dataclass(frozen=True)
class Task:
    """What a kind of model is trained to do: its classes, and a batch of some rows and some length."""

    mapping: str
    batch: Callable[[PretrainedConfig, int, int], Batch]
    labels: int = CLASSES
    sizes: tuple[tuple[int, int], ...] = ((2, 8), (3, 12), (4, 10))

    def classes(self) -> Iterator[tuple[str, str]]:
        """The model types and the names of their classes."""
        for kind, name in getattr(modeling_auto, self.mapping).items():
            yield kind, name if isinstance(name, str) else name[0]


def text(_: PretrainedConfig, rows: int, length: int) -> Batch:
    """Token ids, of which each row but the first has some padding at its end."""
    ids = torch.randint(3, VOCABULARY, (rows, length))
    kept = torch.tensor([length] + [max(2, length - 1 - row % 3) for row in range(1, rows)])
    mask = (torch.arange(length) < kept[:, None]).long()
    ids[torch.arange(rows), kept - 1] = 2
    return {"input_ids": ids * mask, "attention_mask": mask}


def causal(config: PretrainedConfig, rows: int, length: int) -> Batch:
    """The next token of each."""
    batch = text(config, rows, length)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def masked(config: PretrainedConfig, rows: int, length: int) -> Batch:
    """Half of the tokens."""
    batch = text(config, rows, length)
    return batch | {"labels": batch["input_ids"].masked_fill(torch.rand(rows, length) < 0.5, -100)}


def classified(config: PretrainedConfig, rows: int, length: int) -> Batch:
    """One class for each row."""
    return text(config, rows, length) | {"labels": torch.randint(0, CLASSES, (rows,))}


def tagged(config: PretrainedConfig, rows: int, length: int) -> Batch:
    """One class for each token that is no padding."""
    batch = text(config, rows, length)
    labels = torch.randint(0, CLASSES, (rows, length))
    return batch | {"labels": labels.masked_fill(batch["attention_mask"] == 0, -100)}


def answered(config: PretrainedConfig, rows: int, length: int) -> Batch:
    """Where an answer begins and ends."""
    first, last = torch.randint(0, 2, (2, rows))
    return text(config, rows, length) | {"start_positions": first, "end_positions": last}


def chosen(config: PretrainedConfig, rows: int, length: int) -> Batch:
    """One of two texts."""
    batch = {name: item.view(rows, 2, length) for name, item in text(config, 2 * rows, length).items()}
    return batch | {"labels": torch.randint(0, 2, (rows,))}


def written(config: PretrainedConfig, rows: int, length: int) -> Batch:
    """Another text for each."""
    labels = torch.randint(3, VOCABULARY, (rows, length // 2 + 2))
    labels[-1, -1] = -100
    return text(config, rows, length) | {"labels": labels}


def pictures(config: PretrainedConfig, rows: int, _: int) -> Batch:
    """One class for each picture."""
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.randn(rows, channels, SIDE, SIDE), "labels": torch.randint(0, CLASSES, (rows,))}


def sounds(_: PretrainedConfig, rows: int, length: int) -> Batch:
    """A text for each sound."""
    return {"input_values": torch.randn(rows, 40 * length), "labels": torch.randint(3, VOCABULARY, (rows, 3))}


def sounds_classified(_: PretrainedConfig, rows: int, length: int) -> Batch:
    """A class for each sound."""
    return {"input_values": torch.randn(rows, 40 * length), "labels": torch.randint(0, CLASSES, (rows,))}


TASKS = {
    "causal": Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", causal),
    "masked": Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", masked),
    "classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", classified),
    "tokens": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", tagged),
    "answers": Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", answered, labels=2),
    "choice": Task("MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES", chosen),
    "seq2seq": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", written),
    "images": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", pictures),
    "speech": Task("MODEL_FOR_CTC_MAPPING_NAMES", sounds),
    "audio": Task("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", sounds_classified),
}


def tiny(kind: str, name: str, labels: int = CLASSES, otherwise: dict[str, Any] | None = None) -> nn.Module:
    """A model of a class, in training; every matrix is random, so that no gradient is zero by accident."""
    torch.manual_seed(0)
    found = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[kind])
    config = configured(found, SMALL | {"num_labels": labels} | OF_KIND.get(kind, {}) | (otherwise or {}))
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"not tiny: {count:,} parameters")
    model: nn.Module = model_class(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
    return model.train()


def configured(config_class: type[PretrainedConfig], sizes: dict[str, Any]) -> PretrainedConfig:
    """A configuration with these sizes, as far as it knows them, also in its parts."""
    usual = config_class()
    known = {name: value for name, value in sizes.items() if _takes(usual, name, value)}
    known = {usual.attribute_map.get(name, name): value for name, value in known.items()}
    for part in PARTS:
        if isinstance(inner := getattr(usual, part, None), PretrainedConfig):
            known[part] = configured(type(inner), sizes).to_dict()
    return config_class(**known)


def _takes(usual: PretrainedConfig, name: str, value: Any) -> bool:
    """Whether a configuration has a setting, and of such a form."""
    if name == "decoder_start_token_id":
        return bool(usual.is_encoder_decoder)
    if value is None or not hasattr(usual, name):
        return False
    several = isinstance(getattr(usual, name), list | tuple)
    return several == isinstance(value, list | tuple)
