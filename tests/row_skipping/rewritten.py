"""Runs a module on its smaller graph by PyTorch, without lowering, and compares it with eager mode."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ort_accel.capture.dynamo import capturing
from ort_accel.capture.forward_graph import Tracer
from ort_accel.capture.traced_shapes import freed_traces, note_shapes
from ort_accel.compiler.row_dispatch import hints, tables_of
from ort_accel.row_skipping.batch_row_tables import BatchTables
from ort_accel.row_skipping.pipeline import NothingToSkip, Proposal, propose, unread_outputs
from ort_accel.row_skipping.row_demand import SkippableRows
from tests.against_eager import ATOL, RTOL
from tests.row_skipping.modules import padded

EVERYTHING = SkippableRows()


class Rewritten:
    """Runs a module on the rows that are needed, and records graphs and batches."""

    def __init__(self, module: nn.Module, wishes: SkippableRows = EVERYTHING, *, loss_only: bool = False) -> None:
        self.module, self._wishes, self._loss_only = module, wishes, loss_only
        self.proposals: list[Proposal] = []
        self.batches: list[BatchTables] = []
        self.graphs: list[fx.GraphModule] = []
        """The smaller graphs."""
        self.reasons: list[str] = []
        """The reasons for which graphs were left whole."""
        self.ran: Counter[str] = Counter()
        self.inputs: list[Sequence[Any]] = []
        """The inputs that graphs were compiled for."""
        self._call = torch.compile(module._call_impl, backend=self._compile, dynamic=True)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with capturing(), freed_traces():
            return self._call(*inputs, **named)

    @property
    def proposal(self) -> Proposal:
        """The last proposal."""
        assert self.proposals, self.reasons
        return self.proposals[-1]

    @property
    def graph(self) -> fx.Graph:
        """The only smaller graph."""
        (module,) = self.graphs
        return module.graph

    def kept(self) -> list[tuple[int, int]]:
        """Returns the rows and the size of each row set of the last batch."""
        return self.batches[-1].densities

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        note_shapes()
        tracer = Tracer(inputs)
        try:
            traced = tracer.trace(module)
            unread = unread_outputs(traced, inputs, beside_sums=True) if self._loss_only else frozenset()
            proposal = propose(traced, inputs, self._wishes, unread)
        except NothingToSkip as reason:
            self.reasons.append(str(reason))
            return module.forward
        self.proposals.append(proposal)
        self.inputs.append(hints(inputs))
        tables = tables_of(proposal.front(hints(inputs)))
        if not tables:
            return self._run(module, proposal, None, lambda _: True)
        smaller = tracer.smaller(module, proposal.write, tables)
        self.graphs.append(smaller)
        return self._run(module, proposal, smaller, tracer.conditions())

    def _run(
        self, module: fx.GraphModule, proposal: Proposal, smaller: fx.GraphModule | None, holds: Callable[..., bool]
    ) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            batch = proposal.front(inputs)
            self.batches.append(batch)
            if smaller is None or not batch.fits or not holds([*inputs, *batch.tables]):
                self.ran["all rows"] += 1
                return module(*inputs)
            self.ran["some rows"] += 1
            return smaller(*inputs, *batch.tables)

        return run


def rewritten(
    module: nn.Module, *inputs: Any, wishes: SkippableRows = EVERYTHING, loss_only: bool = False
) -> Rewritten:
    """Returns a copy of a module that was compared with the module on one batch."""
    ours = Rewritten(copy.deepcopy(module), wishes, loss_only=loss_only)
    assert_as_eager(module, ours, *inputs)
    return ours


def assert_as_eager(eager: nn.Module, ours: Rewritten, *inputs: Any, **named: Any) -> None:
    """Asserts equal results, equal gradients and equal random numbers."""
    wanted, got = outcome(eager, eager, *inputs, **named), outcome(ours.module, ours, *inputs, **named)
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=RTOL, atol=ATOL, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def padding_left_out(module: nn.Module) -> Rewritten:
    """Asserts that three padded batches equal eager mode on a graph for their real tokens."""
    ours = Rewritten(module)
    for lengths in [(2, 5, 9), (9, 1, 4), (3, 3, 8, 6)]:
        ids, mask = padded(*lengths)
        assert_as_eager(module, ours, ids, mask)
        assert (int(mask.sum()), mask.numel()) in ours.kept()
    assert ours.ran == {"some rows": 3}
    return ours


def outcome(module: nn.Module, call: Callable[..., Any], *inputs: Any, **named: Any) -> dict[str, Tensor | None]:
    """Returns a step's loss, its gradients by name, and the state of the random numbers."""
    module.zero_grad()
    torch.manual_seed(3)
    found = call(*inputs, **named)
    loss = found if isinstance(found, Tensor) else found.loss
    if loss.requires_grad:
        (loss * torch.linspace(0.5, 1, loss.numel()).view_as(loss)).sum().backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    return {"the loss": loss.detach(), "random numbers": torch.get_rng_state()} | gradients
