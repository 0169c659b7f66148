"""Rotary embeddings, in the forms in which models write them, are one operator with eager's results and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as of_neighbours
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import ort_accel
from tests.tiers import mostly_long

NAME = "fused rotary embeddings"
HEADS, DIM = 3, 8

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]


def of_llama(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return apply_rotary_pos_emb(x, x, cosines, sines)[0]


def of_chunks(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return sines.unsqueeze(1) * torch.cat([-high, low], dim=3) + cosines.unsqueeze(1) * x


def of_a_part(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    rotated, rest = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat((of_llama(rotated, cosines[..., : DIM // 2], sines[..., : DIM // 2]), rest), -1)


def with_other_halves(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned = torch.cat((-x[..., 2:], x[..., :2]), -1)
    return x * cosines.unsqueeze(1) + turned * sines.unsqueeze(1)


def turned_the_other_way(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned = torch.cat((x[..., DIM // 2 :], -x[..., : DIM // 2]), -1)
    return x * cosines.unsqueeze(1) + turned * sines.unsqueeze(1)


def of_two_values(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)
    return x.exp() * cosines.unsqueeze(1) + turned * sines.unsqueeze(1)


def read_between(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sines.unsqueeze(1)
    return x * cosines.unsqueeze(1) + turned + turned


FUSED: dict[str, Rotation] = {"Llama": of_llama, "chunks": of_chunks, "a part": of_a_part}
OTHERS: dict[str, Rotation] = {
    "neighbours": lambda x, cosines, sines: of_neighbours(x, x, cosines, sines)[0],
    "other halves": with_other_halves,
    "the other way": turned_the_other_way,
    "two values": of_two_values,
    "read between": read_between,
}


class Attention(nn.Module):
    def __init__(self, rotation: Rotation, learned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.out = nn.Linear(HEADS * DIM, HEADS * DIM), nn.Linear(HEADS * DIM, 2)
        self.angles = nn.Parameter(torch.randn(DIM), requires_grad=learned)
        self._rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).view(*x.shape[:2], HEADS, DIM).transpose(1, 2)
        angles = torch.arange(x.shape[1])[None, :, None] * self.angles
        rotated = self._rotation(query, angles.cos(), angles.sin())
        return self.out(rotated.transpose(1, 2).reshape(*x.shape[:2], -1))


def compared(eager: nn.Module, native: bool = True) -> int:
    """Returns how many embeddings were fused, after steps of batches of several sizes."""
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"compute": {"native": native}, "engine": {"fallback": "error"}})
    for batch, length in ((2, 5), (3, 7), (1, 9), (2, 1)):
        x = torch.randn(batch, length, HEADS * DIM)
        for model in (eager, ours):
            model.zero_grad()
            model(x).square().sum().backward()
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            assert (one.grad is None) is (other.grad is None)
            if other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4 * float(other.grad.abs().max()))
    return ort_accel.report(ours).counters.get(NAME, 0)


@pytest.mark.parametrize(
    ("name", "native"), mostly_long(product(FUSED, (True, False)), *product(FUSED, (True,)), ("Llama", False))
)
def test_an_embedding_is_one_operator_with_eagers_gradients(name: str, native: bool) -> None:
    assert compared(Attention(FUSED[name]), native) > 0


@pytest.mark.parametrize("name", mostly_long(OTHERS, "neighbours", "other halves", "the other way"))
def test_what_is_no_such_embedding_stays_as_it_is(name: str) -> None:
    assert compared(Attention(OTHERS[name])) == 0


def test_tables_with_gradients_stay_as_they_are() -> None:
    assert compared(Attention(of_llama, learned=True)) == 0


def test_an_odd_width_stays_as_it_is() -> None:
    def of_odd(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        return of_llama(x[..., 1:], cosines[..., 1:], sines[..., 1:])

    class Odd(Attention):
        def __init__(self) -> None:
            super().__init__(of_odd)
            self.out = nn.Linear(HEADS * (DIM - 1), 2)

    assert compared(Odd()) == 0


def test_halves_stay_as_they_are() -> None:
    eager = Attention(of_llama).to(torch.bfloat16)
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    x = torch.randn(2, 5, HEADS * DIM, dtype=torch.bfloat16)
    torch.testing.assert_close(ours(x), eager(x), rtol=2e-2, atol=2e-2)
    assert NAME not in ort_accel.report(ours).counters
