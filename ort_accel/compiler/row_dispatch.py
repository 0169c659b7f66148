"""Decides between the graph for the rows that count and the whole graph, and runs a batch on the one chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ort_accel.compiler.features import UNSEEN
from ort_accel.config import Config
from ort_accel.config.values import Switch
from ort_accel.eager.run_eager import eager_function
from ort_accel.errors import OrtAccelError, first_line, in_a_line
from ort_accel.reporting.report import Report
from ort_accel.row_skipping.batch_row_tables import BatchTables
from ort_accel.row_skipping.pipeline import NothingToSkip, Proposal, row_sets_by_feature
from ort_accel.row_skipping.row_demand import SkippableRows

LOG = logging.getLogger("ort_accel")

FEATURES = ("density.labels", "density.padding", "compute.upstream")

COUNT_EVERY_BATCHES = 4
"""Every so many batches on the whole graph, the rows that count are counted."""

DECAY = 0.9
"""Factor of the moving averages per batch: about the last ten batches count."""

PER_TOKEN = "the model's outputs for each token (logits, hidden states)"

UNSEEN_PADDING = "; NaN or infinity in padding goes unseen (density.padding: false computes it, as eager mode does)"

DECIDE_EVERY_BATCHES = 8
"""Batches between two decisions, so that a single batch does not lead to compiling."""


class Mode(NamedTuple):
    """Properties of the compiled graphs; each combination is compiled once."""

    compact: bool
    """Rows are left out."""
    loss_only: bool
    """Outputs beside the loss are lazy tensors."""


@dataclass
class RowSkippingPolicy:
    """Decides between smaller and whole graphs for a model, from the rows that count in its batches."""

    config: Config
    report: Report
    sees_steps: bool = True
    """Graphs are steps of a whole model, so that the next step can be compiled for what this one has taught."""
    graph_breaks: bool = False
    """Python runs between the graphs of a step, and may read any output."""
    _work: float = 0.0
    _needed: float = 0.0
    """Moving averages of the floating point operations of all rows, and of the rows that count."""
    _compact: bool | None = None
    _since_decision: int = 0
    """Batches since the last decision."""
    _batches: int = 0
    _ran_compact: int = 0
    """Batches that left rows out."""
    loss_only: bool = field(init=False)
    """True as long as the script is not known to read outputs beside the loss."""
    _was_read: bool = False
    _counted_rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By feature, the rows that counted, and all rows."""
    _counted_pairs: tuple[int, int] = (0, 0)
    """The pairs of tokens in packed rows of which one attends to the other, and all pairs."""

    def __post_init__(self) -> None:
        self.loss_only = self.config.compute.loss_only is not False

    @property
    def wishes(self) -> SkippableRows:
        """Returns the reasons for leaving rows out that the configuration allows."""
        density, compute = self.config.density, self.config.compute
        return SkippableRows(density.labels is not False, density.padding is not False, compute.upstream)

    @property
    def wants_any(self) -> bool:
        """True if the configuration allows any of them."""
        return self.wishes != SkippableRows(False, False, False)

    @property
    def mode(self) -> Mode | None:
        """Returns what to compile or run next; None until the first batch decides."""
        is_open = self._compact is None and not self._was_read
        return None if is_open else Mode(bool(self._compact), self.loss_only)

    @property
    def variants(self) -> list[str]:
        """Returns names of the ways to compile a graph now, the first choice first: for some rows, and for all."""
        if self._compact is None:
            return ["some rows", "all rows"] if self.wants_any else ["all rows"]
        return ["some rows" if self._compact else "all rows"]

    @property
    def leaves_outputs_unread(self) -> bool:
        """True if the next graph computes outputs beside its loss only when they are read."""
        return self.loss_only and not self.graph_breaks and torch.is_grad_enabled()

    @property
    def learns_of_reads(self) -> bool:
        """True if reading a lazy output enables it from the next step on; otherwise reading it raises."""
        return self.sees_steps or self.config.compute.loss_only is True

    def wants_compact(self, proposal: Proposal, batch: BatchTables) -> bool:
        """True if the smaller graph is to be compiled now; the first batch decides."""
        self._refuse_impossible(proposal)
        if self._compact is None:
            self._count_work(proposal, batch)
        return bool(self._compact)

    def _refuse_impossible(self, proposal: Proposal) -> None:
        """Raise if a feature that is set to true cannot leave rows out of a training graph."""
        kinds = row_sets_by_feature(proposal.plan)
        for feature in self._required_features():
            if not kinds[feature]:
                raise OrtAccelError(_impossible(feature, proposal.why_whole))

    def _count_work(self, proposal: Proposal, batch: BatchTables) -> None:
        """Count the work that a batch needs, and decide anew if it is time."""
        self._work = DECAY * self._work + proposal.work
        self._needed = DECAY * self._needed + proposal.needed(batch)
        self._since_decision += 1
        if self._compact is None or self._since_decision >= DECIDE_EVERY_BATCHES:
            always = True in (self.config.density.labels, self.config.density.padding)
            self._compact = always or self._needed / self._work < self.config.density.threshold
            self._since_decision = 0

    def ran(self, proposal: Proposal, batch: BatchTables, compact: bool) -> None:
        """Count a batch that runs on some of its rows, or on all."""
        self._count_work(proposal, batch)
        self._batches += 1
        self._ran_compact += compact
        self.report.counters[f"batches run on {'some' if compact else 'all'} rows"] += 1
        if not batch.fits:
            return
        if batch.sequences:
            if compact:
                self.report.counters["packed sequences"] += batch.sequences
            attending, pairs = (sum(column) for column in zip(self._counted_pairs, *batch.pairs, strict=True))
            self._counted_pairs = attending, pairs
        counts = dict(zip((rows.number for rows in proposal.plan.sets), batch.densities, strict=True))
        for feature, sets in row_sets_by_feature(proposal.plan).items():
            for rows in sets:
                kept, whole = self._counted_rows.get(feature, (0, 0))
                count, size = counts[rows.number]
                self._counted_rows[feature] = kept + count, whole + size
        if self._batches & (self._batches - 1) == 0:
            self._record()

    def _record(self) -> None:
        batches = "batch" if self._batches == 1 else "batches"
        for feature, _ in self._enabled_features():
            if feature in self._counted_rows:
                kept, whole = self._counted_rows[feature]
                said = f"{kept / max(whole, 1):.0%} of the rows count, over {self._batches} {batches}"
                if feature == "density.padding" and self._counted_pairs[1]:
                    attending, pairs = self._counted_pairs
                    said += f", and {attending / pairs:.0%} of the pairs of tokens in packed rows"
                if self._ran_compact:
                    unseen = UNSEEN_PADDING if feature == "density.padding" else ""
                    self.report.applied(feature, f"{said}, of which {self._ran_compact} left rows out{unseen}")
                else:
                    self.report.off(feature, f"{said}, too many for leaving rows out to pay")
            else:
                self.report.off(feature, "no part of this model has such rows")

    def was_read(self) -> None:
        """Called when the script reads a lazy output: from the next step on it is computed."""
        if self.config.compute.loss_only is True:
            raise OrtAccelError(
                f"compute.loss_only is true, and the script reads {PER_TOKEN} in training; set it to auto or false"
            )
        if self.loss_only:
            LOG.info("the script reads %s in training: from the next step on they are computed", PER_TOKEN)
        self.loss_only, self._was_read = False, True
        self.report.refused("compute.loss_only", f"the script reads {PER_TOKEN} in training")

    def refused(self, error: Exception) -> None:
        """Record why a graph runs whole; raise if a feature that is set to true applies to it."""
        what = first_line(error) if isinstance(error, NothingToSkip) else in_a_line(error)
        for feature in self._required_features():
            raise OrtAccelError(_impossible(feature, what)) from error
        says_nothing_new = self._batches > 0 and not torch.is_grad_enabled()  # an evaluation beside a training
        for feature, _ in self._enabled_features():
            if feature not in self._counted_rows and not says_nothing_new:
                self.report.refused(feature, what)

    def _enabled_features(self) -> list[tuple[str, Switch]]:
        """Returns the features that are not switched off, with their switches."""
        wishes = (self.config.density.labels, self.config.density.padding, self.config.compute.upstream)
        return [(name, wish) for name, wish in zip(FEATURES, wishes, strict=True) if wish is not False]

    def _required_features(self) -> list[str]:
        """Returns the features that must leave rows out of the present graph: those set to true, in training."""
        wanted = self._enabled_features() if torch.is_grad_enabled() else []
        return [feature for feature, wish in wanted if wish is True and feature.startswith("density")]

    def compiled(self, *, has_lazy_outputs: bool) -> None:
        """Record whether a graph that was compiled has lazy outputs."""
        if has_lazy_outputs:
            self.report.applied("compute.loss_only", f"{PER_TOKEN} are computed only if the script reads them")
        elif torch.is_grad_enabled() and self.loss_only and self._is_loss_only_unseen():
            why = f"Python runs between graphs, and may read {PER_TOKEN}"
            nothing = "nothing that a step gives has a place for each token"
            self.report.off("compute.loss_only", why if self.graph_breaks else nothing)

    def _is_loss_only_unseen(self) -> bool:
        return self.report.features["compute.loss_only"].reason == UNSEEN


def _impossible(feature: str, why: str) -> str:
    return f"{feature} is true, but no row can be left out: {why}; set it to auto, which runs such models whole"


@dataclass(frozen=True)
class SmallerGraph:
    """A proposal to leave rows out; with the smaller graph and its additional inputs if that pays."""

    proposal: Proposal
    smaller: fx.GraphModule | None = None
    tables: Sequence[Tensor] = ()


class RowDispatch:
    """Runs one captured graph for the rows that count in each batch."""

    def __init__(
        self,
        proposal: Proposal,
        policy: RowSkippingPolicy,
        run: Callable[..., Sequence[object]],
        module: fx.GraphModule,
        holds: Callable[[Sequence[object]], bool] | None = None,
    ) -> None:
        """`run` is the compiled graph; if there is `holds`, it is the smaller one, which also takes a batch's tables.

        `holds` returns True if the smaller graph was compiled for inputs and tables of such sizes.
        """
        self.proposal, self._policy, self._run = proposal, policy, run
        self._eager: Callable[..., Sequence[object]] = eager_function(module)
        self._holds, self._calls = holds, 0

    def __call__(self, *inputs: object) -> Sequence[object]:
        if self._holds is None:
            self._calls += 1
            if self._calls % COUNT_EVERY_BATCHES == 1:
                batch = self.proposal.front(inputs, with_tables=False)
                self._policy.ran(self.proposal, batch, compact=False)
            return self._run(*inputs)
        batch = self.proposal.front(inputs)
        is_possible = batch.fits and self._holds([*inputs, *batch.tables])
        self._policy.ran(self.proposal, batch, compact=is_possible)
        if not is_possible:  # the results depend on rows that the smaller graph leaves out
            return self._eager(*inputs)
        return self._run(*inputs, *batch.tables)


def hints(inputs: Sequence[object]) -> list[object]:
    """Returns the inputs of a graph, with numbers for symbolic sizes."""
    return [item.node.hint if isinstance(item, torch.SymInt) else item for item in inputs]


def tables_of(batch: BatchTables) -> list[Tensor]:
    """Returns the tables of a batch as inputs of a graph to be captured, which must not share memory."""
    return [table.clone() for table in batch.tables]
