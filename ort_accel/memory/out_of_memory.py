"""Running out of memory: how it is known, in the words of PyTorch, ONNX Runtime and Python, and what helps."""

from __future__ import annotations

import torch

from ort_accel.memory.process_memory import resident

HELP = (
    "Train with smaller batches and more gradient accumulation (a Trainer finds the size by auto_find_batch_size), or "
    "keep less for the backward: memory.budget or memory.level in ort_accel's configuration"
)

_WORDS = ("out of memory", "allocate memory", "bad_alloc", "bad allocation")


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _WORDS)


def explain_lack_of_memory(error: BaseException) -> None:
    """Add to an error that memory ran out in which process that was, and what helps; to another error, nothing.

    The error stays what it is, so that whoever looks for it finds it, as Trainers do that look for a batch size.
    """
    if not is_lack_of_memory(error) or any(HELP in note for note in getattr(error, "__notes__", ())):
        return
    held = resident()
    holding = "" if held is None else f" It holds {held / 2**20:,.0f} MiB."
    error.add_note(f"ort_accel: {_this_process()} ran out of memory.{holding} {HELP}.")


def _this_process() -> str:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return f"rank {distributed.get_rank()} of {distributed.get_world_size()} processes"
    return "this process"
