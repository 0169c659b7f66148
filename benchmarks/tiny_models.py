"""Tiny random models of every architecture that transformers can train, and batches for them. Nothing is downloaded."""

from __future__ import annotations

import inspect
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
IMAGE, WORDS = 3, 8
"""The token that stands for a part of a picture, and the first that stands for nothing else than a word."""
MOST_PARAMETERS = 20_000_000

Batch = dict[str, Any]


def _each(names: str, value: Any) -> dict[str, Any]:
    """The same value for several names."""
    return dict.fromkeys(names.split(), value)


SMALL: dict[str, Any] = {
    **_each("vocab_size src_vocab_size entity_vocab_size vocab_size_per_layer_input", VOCABULARY),
    "num_labels": CLASSES,
    "pad_token_id": 0,
    **_each("bos_token_id cls_token_id decoder_start_token_id", 1),
    **_each("eos_token_id sep_token_id", 2),
    **_each("image_token_id image_token_index", IMAGE),
    "vision_start_token_id": 4,
    "vision_end_token_id": 5,
    **_each("video_token_id video_token_index", 6),
    "audio_token_id": 7,
    "forced_bos_token_id": None,
    **_each("max_position_embeddings n_positions n_ctx seq_length max_seq_len", 64),
    **_each("max_source_positions max_target_positions", 64),
    **_each("hidden_size n_embd d_model embed_dim dim emb_dim embedding_size word_embed_proj_dim", 32),
    **_each("out_hidden_size projection_dim text_hidden_size encoder_hidden_size projector_hidden_size", 32),
    **_each("cross_attention_hidden_size projection_hidden_size pred_hidden_size", 32),
    **_each("intermediate_size n_inner d_inner d_ff ffn_dim hidden_dim ffn_hidden_size", 48),
    **_each("encoder_ffn_dim decoder_ffn_dim", 48),
    **_each("entity_emb_size moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank", 16),
    **_each("head_dim d_head d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim hidden_size_per_layer_input", 8),
    **_each("num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers", 2),
    **_each("num_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers pred_num_hidden_layers", 2),
    **_each("depth num_key_value_heads num_experts_per_tok type_vocab_size", 2),
    **_each("num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads", 4),
    **_each("num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads", 4),
    **_each("decoder_num_attention_heads encoder_num_key_value_heads pred_num_attention_heads", 4),
    **_each("num_local_experts num_experts n_routed_experts moe_num_experts", 4),
    **_each("n_group topk_group", 1),
    "sliding_window": 6,
    **_each("attention_window block_size", 4),
    "state_size": 8,
    **_each("image_size crop_size", SIDE),
    **_each("patch_size encoder_stride", 8),
    "image_grid_pinpoints": [[SIDE, SIDE]],
    **_each("num_position_embeddings num_image_tokens", 16),
    **_each("mm_tokens_per_image num_query_tokens latent_query_num num_frames frames_per_clip", 4),
    **_each("num_queries num_detection_tokens", 6),
    **_each("num_mel_bins input_feat_per_channel feature_projection_input_dim conv_channels", 16),
    "subsampling_conv_channels": 8,
    "num_conv_pos_embeddings": 4,
    **_each("num_conv_pos_embedding_groups num_feat_extract_layers", 2),
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    **_each("apply_spec_augment use_cache", False),
    **_each("layerdrop encoder_layerdrop decoder_layerdrop", 0.0),
    **_each("attention_dropout hidden_dropout", 0.1),
}
"""What makes a model tiny: each configuration takes the names that it has."""

OTHERWISE: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4}, {"attention_dropout": 0.0})
"""What is tried after that, for models that do not have some of it."""

ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
MROPE: dict[str, Any] = {"rope_parameters": ROPE}
ZAMBA = {"attention_head_dim": 16, "attention_hidden_size": 64, "mamba_d_state": 8, "use_mamba_kernels": False}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
DECODES: dict[str, Any] = {
    "decoder": {"is_decoder": True, "add_cross_attention": True},
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
}
BEIT: dict[str, Any] = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
CONVNEXT: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 1], "patch_size": 4}
SWIN = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 2, "encoder_stride": 4}
"""What several kinds have in common; the sections of the positions are for heads of eight numbers."""

OF_KIND: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "audio-spectrogram-transformer": {"max_length": 32, "frequency_stride": 8, "time_stride": 8},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "beit": BEIT,
    "bit": {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": ROPE}},
    "conditional_detr": {"backbone_config": "resnet"},
    "convnext": CONVNEXT,
    "convnextv2": CONVNEXT,
    "cosmos3_edge_text": MROPE,
    "dab-detr": {"backbone_config": "resnet"},
    "data2vec-audio": {"apply_spec_augment": False},
    "data2vec-vision": BEIT,
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "rope_theta": 10_000.0}, "ffn_config": {"moe_top_k": 2}},
    "deformable_detr": {"backbone_config": "resnet", "num_feature_levels": 1},
    "detr": {"backbone_config": "resnet"},
    "distilbert": {"hidden_dim": 48},
    "donut-swin": SWIN,
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dpt": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 16, 16],
        "fusion_hidden_size": 16,
    },
    "efficientnet": {
        **_each("width_coefficient depth_coefficient", 1.0),
        "kernel_sizes": [3, 3],
        "in_channels": [32, 8],
        "out_channels": [8, 16],
        "strides": [1, 2],
        "num_block_repeats": [1, 1],
        "expand_ratios": [1, 2],
        "hidden_dim": 1280,
    },
    "encoder-decoder": DECODES,
    "ernie4_5_vl_moe_text": MROPE | {"moe_intermediate_size": [16, 16]},
    "florence_vision": {
        **_each("num_heads num_groups", [2, 2]),
        "depths": [1, 1],
        "embed_dim": [8, 16],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "window_size": 4,
    },
    "focalnet": CONVNEXT | {"embed_dim": 16, "focal_levels": [1, 1], "focal_windows": [3, 3]},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1]},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.9, 0.0],
        "intermediate_size": [48, 48],
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    },
    "gemma4": {"vision_config": "gemma4_vision"},
    "gemma4_vision": {"pooling_kernel_size": 2},
    "glm4v_moe_text": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    "glm4v_text": MROPE,
    "glm_ocr_text": MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 16,
        **MAMBA,
    },
    "hiera": {
        "depths": [1, 1],
        "num_heads": [1, 2],
        "num_query_pool": 1,
        "masked_unit_size": [4, 4],
        "masked_unit_attention": [True, False],
        "image_size": [SIDE, SIDE],
    },
    "hunyuan_vl_text": MROPE,
    "idefics": {"alpha_initializer": "ones", "freeze_text_layers": False, "freeze_vision_layers": False},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32, "num_embeddings": 16},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 192},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "visual_embed": False},
    "levit": {
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "hidden_sizes": [16, 24, 32],
        "key_dim": [8, 8, 8],
        "patch_size": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "llama4_vision_model": {
        "intermediate_size": 128,
        **_each("projector_input_dim projector_output_dim vision_output_dim", 32),
    },
    "mamba2": {"num_heads": 8, "n_groups": 2, "chunk_size": 4},
    "mistral4": {"head_dim": 16},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0],
        "max_num_tiles": 2,
        "num_global_layers": 1,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        "vision_output_dim": 64,
    },
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16},
    "mobilevitv2": {
        "patch_size": 2,
        "output_stride": 8,
        "base_attn_unit_dims": [16, 16, 16],
        "n_attn_blocks": [1, 1, 1],
    },
    "neomme": {"head_dim": 16},
    "paddleocr_vl_text": MROPE,
    "pix2struct_vision_model": {"patch_embed_hidden_size": 192, "seq_len": 64},
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 4},
    "qwen2_5_vl_text": MROPE,
    "qwen2_vl_text": MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 4},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "axial_pos_embds": False,
        "feed_forward_size": 48,
        "hash_seed": 0,
        **_each("hidden_dropout_prob local_attention_probs_dropout_prob", 0.0),
        **_each("local_attn_chunk_length lsh_attn_chunk_length num_buckets", 2),
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "segformer": {"hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 2, 2, 4]},
    "speech-encoder-decoder": DECODES,
    "swin": SWIN,
    "swinv2": SWIN,
    "table-transformer": {"backbone_config": "resnet"},
    "upernet": {"backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "vision-encoder-decoder": DECODES,
    "vivit": {"tubelet_size": [2, 8, 8]},
    "wav2vec2-bert": {"conv_depthwise_kernel_size": 3},
    "xmod": {"default_language": "en_XX"},
    "yolos": {"image_size": [SIDE, SIDE]},
    "zamba": ZAMBA
    | {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "mamba_dt_rank": 4,
    },
    "zamba2": ZAMBA
    | {
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
        "chunk_size": 4,
        "mamba_headdim": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What single models call otherwise, or demand."""


@dataclass(frozen=True)
class Task:
    """What a kind of model is trained to do: its classes, and a batch of some rows and some length."""

    mapping: str
    batch: Callable[[nn.Module, int, int], Batch]
    labels: int = CLASSES
    sizes: tuple[tuple[int, int], ...] = ((2, 8), (3, 12), (4, 10))

    def classes(self) -> Iterator[tuple[str, str]]:
        """The model types and the names of their classes."""
        for kind, name in getattr(modeling_auto, self.mapping).items():
            yield kind, name if isinstance(name, str) else name[0]


def text(_: nn.Module, rows: int, length: int) -> Batch:
    """Token ids, of which each row but the first has some padding at its end."""
    ids = torch.randint(WORDS, VOCABULARY, (rows, length))
    kept = torch.tensor([length] + [max(2, length - 1 - row % 3) for row in range(1, rows)])
    mask = (torch.arange(length) < kept[:, None]).long()
    ids[torch.arange(rows), kept - 1] = 2
    return {"input_ids": ids * mask, "attention_mask": mask}


def causal(model: nn.Module, rows: int, length: int) -> Batch:
    """The next token of each."""
    batch = text(model, rows, length)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def masked(model: nn.Module, rows: int, length: int) -> Batch:
    """Half of the tokens."""
    batch = text(model, rows, length)
    return batch | {"labels": batch["input_ids"].masked_fill(torch.rand(rows, length) < 0.5, -100)}


def classified(model: nn.Module, rows: int, length: int) -> Batch:
    """One class for each row."""
    return text(model, rows, length) | {"labels": torch.randint(0, CLASSES, (rows,))}


def tagged(model: nn.Module, rows: int, length: int) -> Batch:
    """One class for each token that is no padding."""
    batch = text(model, rows, length)
    labels = torch.randint(0, CLASSES, (rows, length))
    return batch | {"labels": labels.masked_fill(batch["attention_mask"] == 0, -100)}


def answered(model: nn.Module, rows: int, length: int) -> Batch:
    """Where an answer begins and ends."""
    first, last = torch.randint(0, 2, (2, rows))
    return text(model, rows, length) | {"start_positions": first, "end_positions": last}


def chosen(model: nn.Module, rows: int, length: int) -> Batch:
    """One of two texts."""
    batch = {name: item.view(rows, 2, length) for name, item in text(model, 2 * rows, length).items()}
    return batch | {"labels": torch.randint(0, 2, (rows,))}


def written(model: Any, rows: int, length: int) -> Batch:
    """Another text for each, or the next token where a model does not tell the two apart."""
    if not model.config.is_encoder_decoder or model.config.model_type == "fsmt":
        return causal(model, rows, length)
    labels = torch.randint(WORDS, VOCABULARY, (rows, length // 2 + 2))
    labels[-1, -1] = -100
    return text(model, rows, length) | {"labels": labels}


def pictures(model: nn.Module, rows: int, length: int) -> Batch:
    """One class for each picture."""
    shown = _shown(model, rows, length) if "pixel_values" in _accepted(model) else text(model, rows, length)
    return shown | {"labels": torch.randint(0, CLASSES, (rows,))}


def sections(model: nn.Module, rows: int, length: int) -> Batch:
    """One class for each place in a picture."""
    return _shown(model, rows, length) | {"labels": torch.randint(0, CLASSES, (rows, SIDE, SIDE))}


def restored(model: Any, rows: int, length: int) -> Batch:
    """Half of a picture."""
    places = (SIDE // model.config.patch_size) ** 2
    return _shown(model, rows, length) | {"bool_masked_pos": torch.rand(rows, places) < 0.5}


def pairs(model: nn.Module, rows: int, length: int) -> Batch:
    """Which text belongs to which picture."""
    return _shown(model, rows, length) | text(model, rows, length) | {"return_loss": True}


def videos(model: Any, rows: int, _: int) -> Batch:
    """One class for each video."""
    labels = torch.randint(0, CLASSES, (rows,))
    return {model.main_input_name: torch.randn(rows, 4, 3, SIDE, SIDE), "labels": labels}


def detected(model: nn.Module, rows: int, length: int) -> Batch:
    """The classes and places of two things in each picture."""
    boxes = 0.25 + torch.rand(rows, 2, 4) / 4
    labels = [{"class_labels": torch.randint(0, CLASSES, (2,)), "boxes": each} for each in boxes]
    return _shown(model, rows, length) | {"labels": labels}


def seen(model: nn.Module, rows: int, length: int) -> Batch:
    """The next token of each text, which begins with the picture that it is about."""
    batch = causal(model, rows, length)
    shown = _shown(model, rows, length)
    accepted = _accepted(model)
    if "input_ids" not in accepted:
        return shown | {"labels": batch["labels"]}
    front = torch.full((rows, _parts(model, shown) // rows), IMAGE)
    about = torch.cat([torch.ones_like(front), torch.zeros_like(batch["input_ids"])], 1)
    batch = {
        "input_ids": torch.cat([front, batch["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(front), batch["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(front, -100), batch["labels"]], 1),
    }
    if "bbox" in accepted:
        shown["bbox"] = torch.rand(*about.shape, 4)
    if "image_attention_mask" in accepted:
        shown["image_attention_mask"] = torch.ones(*about.shape, 1, dtype=torch.long)
    positions = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask")
    return shown | batch | {name: about for name in positions if name in accepted}


def _parts(model: Any, shown: Batch) -> int:
    """How many tokens stand for the pictures."""
    if hasattr(model.config, "latent_query_num"):
        return int(model.config.latent_query_num * len(next(iter(shown.values()))))
    source = model if hasattr(model, "get_image_features") else model.base_model
    if not hasattr(source, "get_image_features"):
        return 0
    features: Any = source.get_image_features(**shown)
    if not isinstance(features, torch.Tensor | list | tuple):
        features = features.last_hidden_state if features.pooler_output is None else features.pooler_output
    width = features.shape[-1] if isinstance(features, torch.Tensor) else features[0].shape[-1]
    return int(sum(item.numel() for item in features) // width)


def _accepted(model: nn.Module) -> set[str]:
    """The names of what a model takes."""
    return set(inspect.signature(model.forward).parameters)


def _shown(model: Any, rows: int, length: int) -> Batch:
    """A picture for each row, in the form that the model takes it."""
    accepted = _accepted(model)
    if "image_grid_thw" in accepted:
        return _gridded(model, rows)
    if accepted & {"flattened_patches", "spatial_shapes", "image_patches", "image_position_ids"}:
        return _divided(accepted, rows)
    if "aspect_ratio_ids" in accepted:
        first = {"aspect_ratio_ids": torch.ones(rows, 1).long(), "aspect_ratio_mask": torch.tensor([[[1, 0]]] * rows)}
        return {"pixel_values": torch.randn(rows, 1, 2, 3, SIDE, SIDE)} | first
    batch: Batch = {"pixel_values": torch.randn(rows, getattr(model.config, "num_channels", 3), SIDE, SIDE)}
    if "qformer_input_ids" in accepted:
        batch |= {f"qformer_{name}": item for name, item in text(model, rows, length).items()}
    if hasattr(model, "get_image_features") and "image_sizes" in inspect.signature(model.get_image_features).parameters:
        batch["image_sizes"] = torch.tensor([[SIDE, SIDE]] * rows)
    if hasattr(model.config, "image_grid_pinpoints"):
        batch["pixel_values"] = torch.randn(rows, 2, 3, SIDE, SIDE)
    elif accepted & {"pixel_attention_mask", "image_attention_mask"}:
        batch["pixel_values"] = batch["pixel_values"][:, None]
    return batch


def _gridded(model: Any, rows: int) -> Batch:
    """Pictures whose parts follow each other, and how many there are each way."""
    vision, side = model.config.vision_config, 4
    size = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    pixels = torch.randn(rows * side**2, size)
    if model.config.model_type in {"kimi_k25", "paddleocr_vl"}:
        pixels = pixels.reshape(-1, 3, vision.patch_size, vision.patch_size)
    batch = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]] * rows)}
    return batch | ({"image_merge_sizes": torch.full((rows,), 2)} if "image_merge_sizes" in _accepted(model) else {})


def _divided(accepted: set[str], rows: int) -> Batch:
    """Pictures as rows of parts, and where each part is."""
    side = SIDE // 8
    pixels = torch.randn(rows, side**2, 3 * 8**2)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(rows, -1, -1)
    if "flattened_patches" in accepted:
        return {"flattened_patches": torch.cat([places + 1, pixels], 2)}
    batch: Batch = {"pixel_values": pixels}
    if "image_position_ids" in accepted:
        batch["image_position_ids"] = places
    if "spatial_shapes" in accepted:
        batch["spatial_shapes"] = torch.tensor([[side, side]] * rows)
        batch["pixel_attention_mask"] = torch.ones(rows, side**2, dtype=torch.long)
    return batch


def sounds(model: nn.Module, rows: int, length: int) -> Batch:
    """A text for each sound."""
    return _heard(model, rows, 40 * length) | {"labels": torch.randint(WORDS, VOCABULARY, (rows, 3))}


def sounds_classified(model: nn.Module, rows: int, length: int) -> Batch:
    """A class for each sound."""
    return _heard(model, rows, 40 * length) | {"labels": torch.randint(0, CLASSES, (rows,))}


def recognized(model: nn.Module, rows: int, length: int) -> Batch:
    """A longer text for each sound."""
    return _heard(model, rows, 400 * length) | {"labels": torch.randint(WORDS, VOCABULARY, (rows, length))}


def _heard(model: Any, rows: int, length: int) -> Batch:
    """A sound of some length for each row, or how strong it is at sixteen pitches."""
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(rows, 16, 2 * 64)}
    if model.config.model_type == "audio-spectrogram-transformer":
        return {"input_values": torch.randn(rows, model.config.max_length, 16)}
    if model.main_input_name == "input_features":
        length = min(length // 4, 120)
        return {"input_features": torch.randn(rows, length, 16), "attention_mask": torch.ones(rows, length).long()}
    return {"input_values": torch.randn(rows, length)}


TASKS = {
    "causal": Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", causal),
    "masked": Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", masked),
    "classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", classified),
    "tokens": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", tagged),
    "answers": Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", answered, labels=2),
    "choice": Task("MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES", chosen),
    "seq2seq": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", written),
    "images": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", pictures),
    "scenes": Task("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", seen),
    "sections": Task("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", sections),
    "restored": Task("MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES", restored),
    "pairs": Task("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES", pairs),
    "videos": Task("MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES", videos),
    "detected": Task("MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES", detected),
    "speech": Task("MODEL_FOR_CTC_MAPPING_NAMES", sounds),
    "audio": Task("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", sounds_classified),
    "recognized": Task("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", recognized),
}


def tiny(kind: str, name: str, labels: int = CLASSES, otherwise: dict[str, Any] | None = None) -> nn.Module:
    """A model of a class, in training; every matrix is random, so that no gradient is zero by accident."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config_class = model_class.config_class or configuration_auto.CONFIG_MAPPING[kind]
    config = configured(config_class(), SMALL | {"num_labels": labels} | (otherwise or {}), OF_KIND.get(name))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"not tiny: {count:,} parameters")
    model: nn.Module = model_class(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
        elif parameter.numel() == 1 and not parameter.any():
            nn.init.ones_(parameter)
    return model.train()


def configured(usual: PretrainedConfig, sizes: dict[str, Any], also: dict[str, Any] | None = None) -> PretrainedConfig:
    """A configuration with these sizes, as far as it knows them, also in its parts."""
    special = OF_KIND.get(usual.model_type, {}) | (also or {})
    known = {usual.attribute_map.get(name, name): value for name, value in sizes.items() if _takes(usual, name, value)}
    known |= {usual.attribute_map.get(name, name): value for name, value in special.items()}
    for part, inner in vars(usual).items():
        other = special.get(part)
        if isinstance(other, str) and part.endswith("_config"):
            known[part] = configured(configuration_auto.CONFIG_MAPPING[other](), sizes).to_dict()
        elif isinstance(inner, PretrainedConfig):
            known[part] = configured(inner, sizes, other).to_dict()
    return type(usual)(**known)


def _takes(usual: PretrainedConfig, name: str, value: Any) -> bool:
    """Whether a configuration has a setting, and of such a form."""
    if name == "num_labels":
        return True
    if name == "decoder_start_token_id":
        return bool(usual.is_encoder_decoder)
    present = vars(usual)
    name = usual.attribute_map.get(name, name)
    if value is None or name not in present:
        return False
    return isinstance(present[name], list | tuple) == isinstance(value, list | tuple)
