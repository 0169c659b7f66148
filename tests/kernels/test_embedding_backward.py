"""A large embedding's gradient: the same bits as PyTorch's, in memory that ONNX Runtime keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ort_accel
from ort_accel.kernels import embedding_backward as room

COUNT, WIDTH = 22_000, 400  # 33.6 MiB
aten = torch.ops.aten


@pytest.fixture
def taken(monkeypatch):
    """How often memory was taken from the pool."""
    sizes = []
    pooled = room.pooled_zeros
    monkeypatch.setattr(room, "pooled_zeros", lambda *size: sizes.append(size) or pooled(*size))
    return sizes


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_it_is_eagers_to_the_bit(taken, padding, index):
    ids = torch.cat([torch.randint(0, 50, (7, 300)), torch.randint(0, COUNT, (7, 300))], 1).to(index)
    grad = torch.randn(7, 600, WIDTH)
    grad[0, 0, 0] = torch.nan
    for _ in range(2):  # the second time in memory that has been written to
        found = room.embedding_gradient(grad, ids, COUNT, padding, False)
        expected = aten.embedding_dense_backward(grad, ids, COUNT, padding, False)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        found.fill_(7)
        del found
    assert taken == [((COUNT, WIDTH),)] * 2


def test_others_are_pytorchs(taken):
    ids = torch.randint(0, 50, (9,))
    grad = torch.randn(9, WIDTH)
    for gradient, count, by_frequency in ((grad, 50, False), (grad, COUNT, True), (grad.double(), COUNT, False)):
        found = room.embedding_gradient(gradient, ids, count, -1, by_frequency)
        assert torch.equal(found, aten.embedding_dense_backward(gradient, ids, count, -1, by_frequency))
    empty = room.embedding_gradient(grad[:0], ids[:0], COUNT, -1, False)
    assert empty.shape == (COUNT, WIDTH)
    assert not empty.any()
    assert not taken


@pytest.mark.parametrize(("memory", "times"), [({}, 3), ({"level": 1}, 0)])
def test_a_model_takes_it_unless_memory_is_to_be_held(taken, memory, times):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Embedding(COUNT, WIDTH, padding_idx=0), nn.Linear(WIDTH, 3))
    config = {"compute": {"native": False}, "memory": memory, "observe": {"log_level": "error"}}
    ours = ort_accel.accelerate(copy.deepcopy(eager), config)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (eager, ours)]
    for _ in range(3):
        ids = torch.randint(0, COUNT, (4, 8))
        for model, optimizer in zip((eager, ours), optimizers, strict=True):
            model(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(taken) == times
    torch.testing.assert_close(ours.state_dict(), eager.state_dict(), rtol=1e-5, atol=1e-6)
