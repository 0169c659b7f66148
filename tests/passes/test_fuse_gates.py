"""Activated gates, in the forms in which models write them, are one operator with eager's results and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

import ort_accel
from tests.tiers import mostly_long

NAME = "fused gates"
WIDTH = 24

Gate = Callable[[Tensor, Tensor], Tensor]


def of_halves(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


FUSED: dict[str, Gate] = {
    "silu": lambda gate, up: ACT2FN["silu"](gate) * up,
    "behind": lambda gate, up: torch.mul(up, functional.silu(gate)),
    "gelu": lambda gate, up: functional.gelu(gate) * up,
    "tanh's gelu": lambda gate, up: ACT2FN["gelu_pytorch_tanh"](gate) * up,
    "halves": lambda gate, up: (lambda one, other: functional.silu(one) * other)(
        *torch.cat([gate, up], -1).chunk(2, -1)
    ),
    "of itself": lambda gate, up: functional.silu(gate) * gate + up,
}


def without_gradient(gate: Tensor, up: Tensor) -> Tensor:
    with torch.no_grad():
        activated = functional.silu(gate)
    return activated * up


OTHERS: dict[str, Gate] = {
    "an activation under no_grad": without_gradient,
    "read again": lambda gate, up: (lambda y: y * up + y)(functional.silu(gate)),
    "repeated": lambda gate, up: functional.silu(gate) * up[..., :1],
    "repeated gate": lambda gate, up: functional.silu(gate[..., :1]) * up,
    "in place": lambda gate, up: functional.silu(gate + 1, inplace=True) * up,
    "a number": lambda gate, up: functional.silu(gate) * 2 + up,
    "sigmoid": lambda gate, up: gate.sigmoid() * up,
    "another type": lambda gate, up: (functional.silu(gate.double()) * up).float(),
    "transposed": lambda gate, up: functional.silu(gate.transpose(1, 2)).mul(up.transpose(1, 2)).transpose(1, 2),
}


class Gated(nn.Module):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self._gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._gate(self.gate(x), self.up(x)))


def compared(eager: nn.Module, native: bool = True) -> int:
    """Returns how many gates were fused, after steps of batches of several sizes."""
    ours = ort_accel.accelerate(copy.deepcopy(eager), {"compute": {"native": native}, "engine": {"fallback": "error"}})
    for rows, length in ((4, 5), (7, 5), (1, 2)):
        x = torch.randn(rows, length, WIDTH)
        for model in (eager, ours):
            model.zero_grad()
            model(x).square().sum().backward()
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4 * float(other.grad.abs().max()))
            assert (one.grad is None) is (other.grad is None)
    return ort_accel.report(ours).counters.get(NAME, 0)


@pytest.mark.parametrize(
    ("name", "native"), mostly_long(product(FUSED, (True, False)), *product(FUSED, (True,)), ("silu", False))
)
def test_a_gate_is_one_operator_with_eagers_gradients(name: str, native: bool) -> None:
    assert compared(Gated(FUSED[name]), native) > 0


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_such_gate_stays_as_it_is(name: str) -> None:
    assert compared(Gated(OTHERS[name])) == 0


@pytest.mark.parametrize("frozen", ["gate", "up"])
def test_a_frozen_operand_has_no_gradient(frozen: str) -> None:
    eager = Gated(FUSED["silu"])
    getattr(eager, frozen).requires_grad_(False)
    assert compared(eager) > 0


def test_halves_stay_as_they_are() -> None:
    eager = Gated(FUSED["silu"]).to(torch.bfloat16)
    ours = ort_accel.accelerate(copy.deepcopy(eager))
    x = torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)
    torch.testing.assert_close(ours(x), eager(x), rtol=2e-2, atol=2e-2)
    assert NAME not in ort_accel.report(ours).counters
