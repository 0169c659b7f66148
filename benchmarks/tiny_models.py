"""Tiny random models of every architecture that transformers can train. Nothing is downloaded."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto

VOCABULARY, CLASSES, SIDE = 64, 3, 32
IMAGE, WORDS = 3, 8
"""The token that stands for a part of a picture, and the first that stands for nothing else than a word."""
MOST_PARAMETERS = 20_000_000


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
    "deformable_detr": {"backbone_config": "resnet", "num_feature_levels": 1, "d_model": 128},  # groups of 4 channels
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
