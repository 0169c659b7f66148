"""What a classifier of transformers settles in its first call, settled before.

Such a model finds out from its first labels what kind of loss it has, and writes that into its configuration. The graph
of the first call would hold for that call only, and everything would be compiled a second time.
"""

from __future__ import annotations

import dis
import inspect
from types import CodeType
from typing import Any

import torch
from torch import nn

FIELD = "problem_type"


def settle_problem_type(model: nn.Module, labels: torch.Tensor) -> None:
    """Write into the configuration of a model what its call with these labels would write."""
    config = getattr(model, "config", None)
    if getattr(config, FIELD, "") is not None:
        return
    own = (module for module in model.modules() if getattr(module, "config", None) is config)
    if any(map(_settles, own)):  # itself, or what an adapter wraps
        setattr(config, FIELD, _problem_type(config, labels))


def _settles(module: nn.Module) -> bool:
    """Whether a module writes the field, itself or in the loss that transformers gives it; some only read it."""
    code = _code(type(module).forward)
    if code is None:
        return False
    if "loss_function" in code.co_names:
        code = _code(getattr(module, "loss_function", None))
    return code is not None and any(
        step.opname == "STORE_ATTR" and step.argval == FIELD for step in dis.get_instructions(code)
    )


def _code(function: Any) -> CodeType | None:
    found = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return found if isinstance(found, CodeType) else None


def _problem_type(config: Any, labels: torch.Tensor) -> str:
    if config.num_labels == 1:
        return "regression"
    is_one_of_many = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if is_one_of_many else "multi_label_classification"
