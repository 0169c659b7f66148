"""Masks are packed into bits if memory is saved, and unpacked without a change."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ort_accel
from ort_accel.kernels.bit_mask import own
from ort_accel.recompute.pack_masks import LEAST_BYTES
from tests.against_eager import assert_step_as_eager, pair
from tests.recompute.models import ALIKE, assert_same_bits, one_step, plain, recorded
from tests.tiers import mostly_long

ROWS = 256
"""Enough that masks of a hidden size of 32 and 16 tokens are packed."""


@given(st.lists(st.integers(0, 9), max_size=4), st.randoms(use_true_random=False))
def test_unpacking_a_packed_mask_restores_it(sizes, numbers):
    mask = torch.tensor([numbers.random() < 0.5 for _ in range(torch.Size(sizes).numel())]).bool().reshape(sizes)
    bits = own.to_bits(mask)
    assert bits.numel() == -(-mask.numel() // 8)
    assert torch.equal(own.from_bits(bits, sizes), mask)
    turned = mask.permute(tuple(reversed(range(mask.ndim))))
    assert torch.equal(own.from_bits(own.to_bits(turned), list(turned.shape)), turned)


def test_the_operators_match_their_schemas():
    mask = torch.rand(3, 5) < 0.5
    torch.library.opcheck(own.to_bits.default, (mask,))
    torch.library.opcheck(own.from_bits.default, (own.to_bits(mask), [3, 5]))


@pytest.mark.parametrize(
    "memory", mostly_long([{"level": 1}, {"level": 2}, {}, {"budget": 0.9}], {"level": 1}), ids=str
)
def test_packing_changes_no_bit_of_the_gradients(memory):
    trace, record = one_step("bert", memory, ROWS)
    assert_same_bits(trace, plain("bert", rows=ROWS)[0])
    assert 8 * record.bits == record.masks > 0


@pytest.mark.parametrize("name", mostly_long(["gpt2", "t5"], "gpt2"))
def test_other_models_keep_their_gradients_bit_for_bit(name):
    trace, record = one_step(name, {"level": 1}, ROWS)
    assert_same_bits(trace, plain(name, rows=ROWS)[0])
    assert record.masks > 0


def test_level_0_packs_no_masks():
    assert one_step("bert", {"level": 0}, ROWS)[1].masks == 0


def test_small_masks_are_not_packed():
    assert one_step("bert", {"level": 1})[1].masks == 0


def test_a_budget_packs_masks_first():
    without, first, *_ = one_step("bert", {"budget": 0.9}, ROWS)[1].frontier
    assert first.bytes < without.bytes
    assert first.cost_ms > without.cost_ms == 0


def test_the_report_counts_packed_masks():
    record = one_step("bert", {"level": 1}, ROWS)[1]
    whole = plain("bert", rows=ROWS)[1].stash
    assert record.stash_without == whole
    assert record.stash < whole - (record.masks - record.bits)


class Dropping(nn.Module):
    """Applies dropout to a matrix and to a transposed one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        x = nn.functional.dropout(self.first(x), 0.3)
        return nn.functional.dropout(self.second(x.mT), 0.3)


def test_masks_of_every_memory_layout_and_size_are_packed():
    eager, ours = pair(Dropping(), {"memory": {"level": 1}})
    for batch in (3, 2, 5):
        assert_step_as_eager(eager, ours, torch.randn(batch, 256, 256), loss=lambda y: y.square().mean())
    assert recorded(ours).masks


def test_masks_of_dynamic_sizes_are_packed():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.2), nn.Linear(512, 8))
    eager, ours = pair(layers, {"memory": {"level": 1}})
    for rows in (300, 301, 517, 129, 1, 300):
        assert_step_as_eager(eager, ours, torch.randn(rows, 64), loss=lambda y: y.square().mean())
    assert all(graph.masks or graph.stash < LEAST_BYTES for graph in ort_accel.report(ours).memory.values())
    assert any(graph.masks for graph in ort_accel.report(ours).memory.values())


class Showing(nn.Module):
    """Returns a mask that the backward reads."""

    def forward(self, x):
        mask = x > 0
        return torch.where(mask, x * x, x), mask


def test_a_mask_that_the_model_returns_is_not_packed():
    model = ort_accel.accelerate(Showing(), ALIKE | {"memory": {"level": 1}})
    x = torch.randn(2 * LEAST_BYTES, requires_grad=True)
    result, mask = model(x)
    result.sum().backward()
    assert torch.equal(mask, x > 0)
    assert torch.equal(x.grad, torch.where(x > 0, 2 * x, torch.ones_like(x)).detach())
    assert recorded(model).masks == 0


def test_a_backward_can_run_twice():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.2), nn.Linear(512, 8))
    eager, ours = copy.deepcopy(layers), ort_accel.accelerate(layers, ALIKE | {"memory": {"level": 1}})
    x = torch.randn(300, 64)
    found = []
    for model in (eager, ours):
        torch.manual_seed(1)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)
