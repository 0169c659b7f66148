"""ort_accel for Hugging Face scripts: arguments, trainers, a callback for any Trainer, and a plugin for accelerate."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ort_accel.hf.accelerate_plugin import ORTAccelPlugin
    from ort_accel.hf.arguments import ORTSeq2SeqTrainingArguments, ORTTrainingArguments
    from ort_accel.hf.callback import ORTAccelCallback
    from ort_accel.hf.trainer import ORTSeq2SeqTrainer, ORTTrainer

_MODULES = {
    "ORTAccelCallback": "ort_accel.hf.callback",
    "ORTAccelPlugin": "ort_accel.hf.accelerate_plugin",
    "ORTSeq2SeqTrainer": "ort_accel.hf.trainer",
    "ORTSeq2SeqTrainingArguments": "ort_accel.hf.arguments",
    "ORTTrainer": "ort_accel.hf.trainer",
    "ORTTrainingArguments": "ort_accel.hf.arguments",
}

__all__ = [
    "ORTAccelCallback",
    "ORTAccelPlugin",
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainingArguments",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that importing this package imports neither torch nor transformers."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ort_accel.hf' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
