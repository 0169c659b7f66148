"""Models of a transformers configuration with random weights, and random inputs for them. Nothing is downloaded."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from ort_accel.errors import OrtAccelError, in_a_line

Batch = dict[str, torch.Tensor | bool]


def model_from(place: str, layers: int | None = None) -> nn.Module:
    """Returns the model that a `config.json`, given as a file or by its folder, describes, in training mode."""
    path = Path(place)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise OrtAccelError(f"{place}: no config.json of transformers is there; give a model's folder or that file")
    try:
        config = hf.AutoConfig.from_pretrained(file.parent, _configuration_file=file.name, local_files_only=True)
    except Exception as error:  # of any type: transformers checks little of what a file may hold
        raise OrtAccelError(f"{file}: transformers cannot read it: {in_a_line(error)}") from error
    if layers is not None and hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = layers
    names = config.architectures or []
    kinds = [getattr(hf, name, None) for name in names]
    kind = next((each for each in kinds if isinstance(each, type) and issubclass(each, nn.Module)), None)
    if kind is None:
        raise OrtAccelError(f"{file}: names no architecture of transformers {hf.__version__}; seen: {names}")
    torch.manual_seed(0)
    try:
        return kind(config).train()
    except Exception as error:
        raise OrtAccelError(f"{file}: {kind.__name__} cannot be made of it: {in_a_line(error)}") from error


def inputs_for(model: nn.Module, batch: int, length: int) -> Batch:
    """Returns the inputs of a training step, chosen by the names that the model's `forward` takes."""
    accepted = inspect.signature(model.forward).parameters
    config: Any = model.config
    text = config.get_text_config()
    made: Batch = {}
    if "input_ids" in accepted:
        made["input_ids"] = torch.randint(0, text.vocab_size, (batch, length))
        made["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
    if "pixel_values" in accepted:
        made["pixel_values"] = _pixels(config, batch)
    if not made:
        raise OrtAccelError(f"{type(model).__name__} takes neither texts nor images; explain knows no inputs for it")
    if "use_cache" in accepted:
        made["use_cache"] = False
    if "return_loss" in accepted:
        made["return_loss"] = True
    return made | _labels(type(model).__name__, accepted, config, batch, length)


def _pixels(config: Any, batch: int) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(batch, getattr(vision, "num_channels", 3), height, width)


def _labels(name: str, accepted: Container[str], config: Any, batch: int, length: int) -> Batch:
    if "start_positions" in accepted:
        return {key: torch.randint(0, length, (batch,)) for key in ("start_positions", "end_positions")}
    if "labels" not in accepted:
        return {}
    if "Classification" in name and "Token" not in name:
        return {"labels": torch.randint(0, config.num_labels, (batch,))}
    top = config.num_labels if "Token" in name else config.get_text_config().vocab_size
    return {"labels": torch.randint(0, top, (batch, length))}


def loss_of(outputs: Mapping[str, object]) -> torch.Tensor:
    """Returns the loss of a model that computes one, otherwise the mean of its first output."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    return next(value for value in outputs.values() if isinstance(value, torch.Tensor)).float().mean()
