"""Recognizes errors for lack of memory from PyTorch, ONNX Runtime and Python, and adds advice to them."""

from __future__ import annotations

import torch

from ort_accel.memory.process_memory import resident

HELP = (
    "Train with smaller batches and more gradient accumulation (a Trainer finds the size by auto_find_batch_size), or "
    "keep less for the backward: memory.budget or memory.level in ort_accel's configuration"
)

_PHRASES = ("out of memory", "allocate memory", "bad_alloc", "bad allocation")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory ran out."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in text for phrase in _PHRASES)


def explain_out_of_memory(error: BaseException) -> None:
    """Add process, resident set and advice to an error of exhausted memory, whose type and message stay."""
    if not is_out_of_memory(error) or any(HELP in note for note in getattr(error, "__notes__", ())):
        return
    held = resident()
    holding = "" if held is None else f" It holds {held / 2**20:,.0f} MiB."
    error.add_note(f"ort_accel: {_process_name()} ran out of memory.{holding} {HELP}.")


def _process_name() -> str:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return f"rank {distributed.get_rank()} of {distributed.get_world_size()} processes"
    return "this process"
