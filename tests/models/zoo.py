"""Tiny, random models of the families that people train, and batches for them. Nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY = 50

Batch = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """Builders of one model, and of a batch of some rows and length for it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    sizes: tuple[tuple[int, int], ...] = ((2, 8), (3, 12), (4, 10))
    """Rows and lengths of three batches."""

    def __str__(self) -> str:
        return self.name


def text(rows: int, length: int) -> Batch:
    """Token ids, of which each row but the first has some padding."""
    ids = torch.randint(3, VOCABULARY, (rows, length))
    kept = torch.tensor([length] + [max(2, length - 1 - row % 3) for row in range(1, rows)])
    mask = (torch.arange(length) < kept[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def classified(rows: int, length: int) -> Batch:
    return text(rows, length) | {"labels": torch.randint(0, 3, (rows,))}


def masked(rows: int, length: int) -> Batch:
    batch = text(rows, length)
    return batch | {"labels": batch["input_ids"].masked_fill(torch.rand(rows, length) < 0.5, -100)}


def causal(rows: int, length: int) -> Batch:
    batch = text(rows, length)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100), "use_cache": False}


def unpadded(rows: int, length: int) -> Batch:
    ids = torch.randint(3, VOCABULARY, (rows, length))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def sequence_to_sequence(rows: int, length: int) -> Batch:
    return text(rows, length) | {"labels": torch.randint(3, VOCABULARY, (rows, length // 2 + 2))}


def speech_to_text(rows: int, length: int) -> Batch:
    return {"input_features": torch.randn(rows, 8, 32), "labels": torch.randint(3, VOCABULARY, (rows, length))}


def images(size: Callable[[int], int]) -> Callable[[int, int], Batch]:
    def batch(rows: int, length: int) -> Batch:
        side = size(length)
        return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(0, 3, (rows,))}

    return batch


def image_and_text(rows: int, length: int) -> Batch:
    return text(rows, length) | {"pixel_values": torch.randn(rows, 3, 16, 16), "return_loss": True}


def audio(rows: int, length: int) -> Batch:
    return {"input_values": torch.randn(rows, 12 * length), "labels": torch.randint(3, VOCABULARY, (rows, 3))}


ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
DECODER = ENCODER | {"num_key_value_heads": 1, "head_dim": 8, "attention_dropout": 0.1, "pad_token_id": 0}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}


def made(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Returns a builder of a model; every weight is random, so that no gradient is zero by accident."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        module: nn.Module = getattr(hf, model)(getattr(hf, config)(**settings))
        for parameter in module.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
        return module.train()

    return build


FAMILIES = [
    Family("bert", made("BertForSequenceClassification", "BertConfig", **ENCODER, num_labels=3), classified),
    Family("roberta", made("RobertaForMaskedLM", "RobertaConfig", **ENCODER, pad_token_id=0), masked),
    Family(
        "distilbert",
        made(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=32,
            num_labels=3,
        ),
        classified,
    ),
    Family("electra", made("ElectraForMaskedLM", "ElectraConfig", **ENCODER, embedding_size=8), masked),
    Family(
        "deberta-v2",
        made(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **ENCODER,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
            num_labels=3,
        ),
        classified,
    ),
    Family(
        "gpt2",
        made("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64),
        causal,
    ),
    Family(
        "gpt-neox",
        made("GPTNeoXForCausalLM", "GPTNeoXConfig", **ENCODER, attention_dropout=0.1, hidden_dropout=0.1),
        causal,
    ),
    Family(
        "opt",
        made(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            pad_token_id=0,
        ),
        causal,
    ),
    Family(
        "bloom",
        made(
            "BloomForCausalLM",
            "BloomConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            n_layer=2,
            n_head=2,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        ),
        causal,
    ),
    Family("llama", made("LlamaForCausalLM", "LlamaConfig", **DECODER), causal),
    Family("mistral", made("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=6), causal),
    Family("qwen2", made("Qwen2ForCausalLM", "Qwen2Config", **DECODER), causal),
    Family("qwen3", made("Qwen3ForCausalLM", "Qwen3Config", **DECODER), causal),
    Family("gemma", made("GemmaForCausalLM", "GemmaConfig", **DECODER), causal),
    Family(
        "phi",
        made("PhiForCausalLM", "PhiConfig", **ENCODER, embd_pdrop=0.1, resid_pdrop=0.1, pad_token_id=0),
        causal,
    ),
    Family(
        "mixtral",
        made(
            "MixtralForCausalLM",
            "MixtralConfig",
            **DECODER,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        ),
        causal,
    ),
    Family(
        "t5",
        made("T5ForConditionalGeneration", "T5Config", **T5),
        sequence_to_sequence,
    ),
    Family("bart", made("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ), sequence_to_sequence),
    Family(
        "whisper",
        made(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **SEQ2SEQ | {"encoder_layers": 1, "decoder_layers": 1},
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=32,
        ),
        speech_to_text,
    ),
    Family(
        "vit",
        made(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=4,
            num_labels=3,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        ),
        images(lambda length: 16),
    ),
    Family(
        "swin",
        made(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
            num_labels=3,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        ),
        images(lambda length: 32),
    ),
    Family(
        "resnet",
        made(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_labels=3,
        ),
        images(lambda length: 4 * length),
    ),
    Family(
        "clip",
        made(
            "CLIPModel",
            "CLIPConfig",
            text_config=ENCODER | {"eos_token_id": 2, "attention_dropout": 0.1, "num_hidden_layers": 1},
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
            projection_dim=8,
        ),
        image_and_text,
    ),
    Family(
        "wav2vec2",
        made(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            **ENCODER,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            conv_dim=(8, 8),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            apply_spec_augment=False,
            ctc_loss_reduction="mean",
            pad_token_id=0,
        ),
        audio,
    ),
    Family(
        "mamba",
        made(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=1,
            pad_token_id=0,
        ),
        unpadded,
        sizes=((2, 3), (3, 5), (4, 4)),
    ),
]
