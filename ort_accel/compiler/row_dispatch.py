"""Running a smaller graph where rows can be left out, and the whole one where that gains nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ort_accel.compiler.features import UNSEEN
from ort_accel.config import Config
from ort_accel.config.values import Switch
from ort_accel.eager.run_eager import in_eager
from ort_accel.errors import OrtAccelError, first_line, in_a_line
from ort_accel.reporting import Report
from ort_accel.row_skipping.batch_row_tables import Batch
from ort_accel.row_skipping.pipeline import NothingToSkip, Proposal, kinds_of
from ort_accel.row_skipping.row_demand import Wishes

LOG = logging.getLogger("ort_accel")

FEATURES = ("density.labels", "density.padding", "compute.upstream")

LOOK_EVERY = 4
"""While whole graphs run, every so many batches are looked at: looking takes time, too."""

MEMORY = 0.9
"""How much of the moving figure stays from batch to batch: about the last ten batches count."""

PER_TOKEN = "the model's outputs for each token (logits, hidden states)"

UNSEEN_PADDING = "; NaN or infinity in padding goes unseen (density.padding: false computes it, as eager mode does)"

DWELL = 8
"""After so many batches it is decided anew, so that single batches do not lead to compiling."""


class Mode(NamedTuple):
    """What a model's graphs are compiled for; each mode is compiled once."""

    compact: bool
    loss_only: bool


@dataclass
class SkippingPolicy:
    """Decides for a model, from what its batches need, between smaller and whole graphs."""

    config: Config
    report: Report
    _work: float = 0.0
    _needed: float = 0.0
    _compact: bool | None = None
    _weighed: int = 0
    """How many batches were looked at since it was decided."""
    _batches: int = 0
    _ran_compact: int = 0
    """How many of them left rows out."""
    loss_only: bool = field(init=False)
    """Whether nobody is known to read what a training step gives beside its loss."""
    _was_read: bool = False
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loss_only = self.config.compute.loss_only is not False

    @property
    def wishes(self) -> Wishes:
        """Which reasons for leaving rows out count."""
        density, compute = self.config.density, self.config.compute
        return Wishes(density.labels is not False, density.padding is not False, compute.upstream)

    @property
    def wants_any(self) -> bool:
        """Whether there is any reason at all."""
        return self.wishes != Wishes(False, False, False)

    @property
    def mode(self) -> Mode | None:
        """What to compile, or run, next; None before the first batch decides, and where there is nothing to decide."""
        is_open = self._compact is None and not self._was_read
        return None if is_open else Mode(bool(self._compact), self.loss_only)

    @property
    def variants(self) -> list[str]:
        """The ways in which a graph may be compiled now, the first choice first: for some rows, and for all."""
        if self._compact is None:
            return ["some rows", "all rows"] if self.wants_any else ["all rows"]
        return ["some rows" if self._compact else "all rows"]

    def wants_compact(self, proposal: Proposal, batch: Batch) -> bool:
        """Whether to compile the smaller graph now; the first batch decides where none has been seen."""
        self._insist(proposal)
        if self._compact is None:
            self._weigh(proposal, batch)
        return bool(self._compact)

    def _insist(self, proposal: Proposal) -> None:
        """What is set to true is done in training, or it is an error."""
        kinds = kinds_of(proposal.plan)
        for feature in self._insisted():
            if not kinds[feature]:
                raise OrtAccelError(_impossible(feature, proposal.why_whole))

    def _weigh(self, proposal: Proposal, batch: Batch) -> None:
        """Take the work that a batch needs into account."""
        self._work = MEMORY * self._work + proposal.work
        self._needed = MEMORY * self._needed + proposal.needed(batch)
        self._weighed += 1
        if self._compact is None or self._weighed >= DWELL:
            always = True in (self.config.density.labels, self.config.density.padding)
            self._compact = always or self._needed / self._work < self.config.density.threshold
            self._weighed = 0

    def ran(self, proposal: Proposal, batch: Batch, compact: bool) -> None:
        """Take a batch into account that is run for some of its rows, or for all."""
        self._weigh(proposal, batch)
        self._batches += 1
        self._ran_compact += compact
        self.report.counters[f"batches run on {'some' if compact else 'all'} rows"] += 1
        if not batch.fits:
            return
        counts = dict(zip((rows.number for rows in proposal.plan.sets), batch.densities, strict=True))
        for feature, sets in kinds_of(proposal.plan).items():
            for rows in sets:
                kept, whole = self._seen.get(feature, (0, 0))
                count, size = counts[rows.number]
                self._seen[feature] = kept + count, whole + size
        if self._batches & (self._batches - 1) == 0:
            self._record()

    def _record(self) -> None:
        batches = "batch" if self._batches == 1 else "batches"
        for feature, _ in self._wanted():
            if feature in self._seen:
                kept, whole = self._seen[feature]
                said = f"{kept / max(whole, 1):.0%} of the rows count, over {self._batches} {batches}"
                if self._ran_compact:
                    unseen = UNSEEN_PADDING if feature == "density.padding" else ""
                    self.report.applied(feature, f"{said}, of which {self._ran_compact} left rows out{unseen}")
                else:
                    self.report.off(feature, f"{said}, too many for leaving rows out to pay")
            else:
                self.report.off(feature, "no part of this model has such rows")

    def was_read(self) -> None:
        """The script reads what was not computed: from now on it is."""
        if self.config.compute.loss_only is True:
            raise OrtAccelError(
                f"compute.loss_only is true, and the script reads {PER_TOKEN} in training; set it to auto or false"
            )
        if self.loss_only:
            LOG.info("the script reads %s in training: from the next step on they are computed", PER_TOKEN)
        self.loss_only, self._was_read = False, True
        self.report.refused("compute.loss_only", f"the script reads {PER_TOKEN} in training")

    def refused(self, error: Exception) -> None:
        """A graph is left whole, and that is an error where training was to leave rows out."""
        what = first_line(error) if isinstance(error, NothingToSkip) else in_a_line(error)
        for feature in self._insisted():
            raise OrtAccelError(_impossible(feature, what)) from error
        says_nothing_new = self._batches > 0 and not torch.is_grad_enabled()  # an evaluation beside a training
        for feature, _ in self._wanted():
            if feature not in self._seen and not says_nothing_new:
                self.report.refused(feature, what)

    def _wanted(self) -> list[tuple[str, Switch]]:
        """Features that are not switched off, with what is wished."""
        wishes = (self.config.density.labels, self.config.density.padding, self.config.compute.upstream)
        return [(name, wish) for name, wish in zip(FEATURES, wishes, strict=True) if wish is not False]

    def _insisted(self) -> list[str]:
        """Features that must leave rows out of the graph at hand: it is trained, and they are set to true."""
        wanted = self._wanted() if torch.is_grad_enabled() else []
        return [feature for feature, wish in wanted if wish is True and feature.startswith("density")]

    def leaves_unread(self) -> None:
        """Outputs are not computed unless they are read."""
        self.report.applied("compute.loss_only", f"{PER_TOKEN} are computed only if the script reads them")

    def leaves_nothing(self, may_read: bool) -> None:
        """A graph of a step gives nothing that could be left out; `may_read` if Python goes on with what it gives."""
        if self.loss_only and self.report.features["compute.loss_only"].reason == UNSEEN:
            why = f"Python runs between graphs, and may read {PER_TOKEN}"
            self.report.off(
                "compute.loss_only", why if may_read else "nothing that a step gives has a place for each token"
            )


def _impossible(feature: str, why: str) -> str:
    return f"{feature} is true, but no row can be left out: {why}; set it to auto, which runs such models whole"


@dataclass(frozen=True)
class Smaller:
    """What can be left out of a graph; with the smaller graph and its additional inputs, where that is worth it."""

    proposal: Proposal
    smaller: fx.GraphModule | None = None
    tables: Sequence[Tensor] = ()


class Skipping:
    """One graph, run for the rows that count. Called by what Dynamo compiled, with the graph's inputs."""

    def __init__(
        self,
        proposal: Proposal,
        policy: SkippingPolicy,
        run: Callable[..., Any],
        module: fx.GraphModule,
        holds: Callable[[Sequence[Any]], bool] | None = None,
    ) -> None:
        """`run` is the compiled graph. It is the smaller one, which takes the tables of a batch as well, if there is
        `holds`, which tells of inputs and tables whether they are such as the graph was compiled for."""
        self.proposal, self._policy, self._run = proposal, policy, run
        self._eager, self._holds, self._calls = in_eager(module), holds, 0

    def __call__(self, *inputs: Any) -> Any:
        if self._holds is None:
            self._calls += 1
            if self._calls % LOOK_EVERY == 1:
                batch = self.proposal.front(inputs, with_tables=False)
                self._policy.ran(self.proposal, batch, compact=False)
            return self._run(*inputs)
        batch = self.proposal.front(inputs)
        is_possible = batch.fits and self._holds([*inputs, *batch.tables])
        self._policy.ran(self.proposal, batch, compact=is_possible)
        if not is_possible:  # what eager mode gives depends on rows that the smaller graph leaves out
            return self._eager(*inputs)
        return self._run(*inputs, *batch.tables)


def hints(inputs: Sequence[Any]) -> list[Any]:
    """Inputs of a graph as they are, with plain numbers for open sizes."""
    return [item.node.hint if isinstance(item, torch.SymInt) else item for item in inputs]


def tables_of(batch: Batch) -> list[Tensor]:
    """The tables of a batch as inputs of a graph that is yet to be captured: each with memory of its own."""
    return [table.clone() for table in batch.tables]
