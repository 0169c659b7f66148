"""The sampler of allocated bytes."""

from __future__ import annotations

from threading import Event
from unittest.mock import Mock

import pytest

from ort_accel.memory import process_memory


def test_the_thread_that_samples_may_end_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection in that thread can free the model whose memory it samples."""
    if process_memory.in_use() is None:
        pytest.skip("the C library does not tell how much is allocated")
    sampler, ended, errors = process_memory.AllocationSampler(), Event(), []

    def ends_it() -> int:
        try:
            sampler.end()
        except RuntimeError as error:
            errors.append(error)
        ended.set()
        return 0

    monkeypatch.setattr(process_memory, "in_use", ends_it)
    assert ended.wait(10)
    assert errors == []


def test_without_memory_for_a_thread_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    assert process_memory.AllocationSampler().end() is None
