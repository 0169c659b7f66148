"""What the sweep of models trains them to do: the classes that can, and batches for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.auto import modeling_auto

from benchmarks.tiny_models import CLASSES, IMAGE, SIDE, VOCABULARY, WORDS

Batch = dict[str, Any]


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
