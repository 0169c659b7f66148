"""Copies on a CUDA device: what is asked of its streams, in which order, and what is held meanwhile. None is needed."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ort_accel.runtime.host_memory import HostMemory


class Device:
    """Streams that write down what they are asked for; copies are made at once, and end when a test says so."""

    def __init__(self):
        self.asked, self.copies, self.pinned = [], [], []
        self.current = self.stream("computer")

    def stream(self, name):
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.asked.append(f"{name} waits for {other.name}"),
            wait_event=lambda copy: self.asked.append(f"{name} waits for copy {self.copies.index(copy)}"),
            record_event=self.copied,
        )

    def copied(self):
        copy = SimpleNamespace(ended=False)
        copy.query = lambda: copy.ended
        self.asked.append(f"{self.current.name} copies {len(self.copies)}")
        self.copies.append(copy)
        return copy

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty_like(self, tensor, device=None, pin_memory=False):
        self.pinned.append((str(device), pin_memory))
        return torch.zeros_like(tensor)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: made.stream("copier"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch, "empty_like", made.empty_like)
    return made


@pytest.fixture
def memory(device):
    return HostMemory(torch.device("cuda", 0))


def test_values_are_copied_on_a_stream_of_their_own_to_pinned_memory(device, memory):
    value = torch.arange(3.0)
    kept = memory.send(value)
    memory.settle(kept)
    back = memory.fetch(kept)
    memory.settle(back)
    assert torch.equal(back, value)
    assert device.pinned == [("cpu", True), ("cuda:0", False)]
    begun = ["copier waits for computer", "copier copies {}", "computer waits for copy {}"]
    assert device.asked == [text.format(copy) for copy in range(2) for text in begun]


def test_a_strided_value_is_cloned_before_its_copy(memory):
    part = torch.arange(12.0).view(3, 4)[:, :2]
    kept = memory.send(part)
    [copy] = memory._pending.values()
    assert copy.source.stride() == kept.stride() == (2, 1)
    assert torch.equal(kept, part)


def test_an_ended_copy_is_not_waited_for(device, memory):
    kept = memory.send(torch.ones(3))
    device.copies[0].ended = True
    memory.send(torch.ones(3))
    memory.settle(kept)
    assert "computer waits for copy 0" not in device.asked


def test_a_copy_whose_step_failed_holds_its_memory_until_it_has_ended(device, memory):
    memory.fetch(torch.ones(3))  # nobody settles it, nor holds what it copies into
    memory.send(torch.ones(3))
    assert len(memory._pending) == 2
    device.copies[0].ended = device.copies[1].ended = True
    memory.send(torch.ones(3))
    assert len(memory._pending) == 1


def test_unused_pinned_memory_is_released(memory, monkeypatch):
    given = []
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", lambda: given.append("by its public name"), raising=False
    )
    memory.release()
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: given.append("by its older name"), raising=False)
    memory.release()
    assert given == ["by its public name", "by its older name"]


def test_on_the_cpu_a_copy_is_made_at_once():
    memory = HostMemory(torch.device("cpu"))
    value = torch.randn(4, 6).t()
    kept = memory.send(value)
    assert torch.equal(kept, value)
    assert kept.stride() == value.stride()
    assert kept.data_ptr() != value.data_ptr()
    memory.settle(kept)
    memory.release()
