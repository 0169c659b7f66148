"""Compiles a captured graph for the rows that count, or for all rows, with lazy tensors for outputs beside a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from ort_accel.capture.forward_graph import Tracer, has_lost_backward
from ort_accel.compiler.autograd_graphs import CompiledGraph, twice_differentiable
from ort_accel.compiler.lazy_outputs import NO_LAZY_OUTPUTS, LazyOutputs
from ort_accel.compiler.row_dispatch import RowDispatch, RowSkippingPolicy, SmallerGraph, hints, tables_of
from ort_accel.eager.held_outputs import HeldOutputs
from ort_accel.errors import OrtAccelError
from ort_accel.row_skipping.pipeline import NothingToSkip, Proposal, propose, unread_outputs


class RowSkippingCompiler:
    """Compiles the captured graphs of one model with rows and outputs left out."""

    def __init__(
        self,
        policy: RowSkippingPolicy,
        compile_graph: Callable[[fx.GraphModule, Sequence[object]], CompiledGraph],
        held_outputs: HeldOutputs | None,
    ) -> None:
        """`held_outputs` keeps what lazy outputs are computed from when weights change."""
        self._policy, self._compile_graph, self._held_outputs = policy, compile_graph, held_outputs

    def compile(self, module: fx.GraphModule, inputs: Sequence[object]) -> CompiledGraph:
        """Returns the graph for the rows that count, or the whole graph where leaving rows out does not pay."""
        policy, tracer, lazy = self._policy, Tracer(inputs), NO_LAZY_OUTPUTS
        found: SmallerGraph | None = None
        try:
            traced = _traced(module, tracer)
            if policy.leaves_outputs_unread:
                unread = unread_outputs(traced, inputs, beside_sums=policy.learns_of_reads)
                lazy = LazyOutputs(traced, unread)
            found = self._smaller(module, inputs, tracer, propose(traced, inputs, policy.wishes, lazy.positions))
        except OrtAccelError:
            raise
        except Exception as error:  # a model that cannot be analysed runs whole, and the report says why
            policy.refused(error)
        if found is not None and found.smaller is not None:
            run = self._compile_graph(found.smaller, [*inputs, *found.tables])
            run = self._with_lazy_outputs(lazy, run, module)
            return RowDispatch(found.proposal, policy, run, module, tracer.conditions())
        tracer.conditions()
        if not policy.learns_of_reads:
            lazy = NO_LAZY_OUTPUTS
        with lazy.left_out_of(module):
            run = self._compile_graph(module, inputs)
        run = self._with_lazy_outputs(lazy, run, module)
        return run if found is None else RowDispatch(found.proposal, policy, run, module)

    def _smaller(
        self, module: fx.GraphModule, inputs: Sequence[object], tracer: Tracer, proposal: Proposal
    ) -> SmallerGraph:
        batch = proposal.front(hints(inputs))
        if not self._policy.wants_compact(proposal, batch):
            return SmallerGraph(proposal)
        tables = tables_of(batch) if batch.fits else proposal.front.example(hints(inputs))
        if not tables:
            return SmallerGraph(proposal)
        return SmallerGraph(proposal, tracer.smaller(module, proposal.write, tables), tables)

    def _with_lazy_outputs(self, lazy: LazyOutputs, run: CompiledGraph, module: fx.GraphModule) -> CompiledGraph:
        self._policy.compiled(has_lazy_outputs=bool(lazy.positions))
        run = twice_differentiable(run, module, self._policy.report)
        return lazy.added_to(run, module, self._policy.was_read, self._held_outputs)


def _traced(module: fx.GraphModule, tracer: Tracer) -> fx.GraphModule:
    if has_lost_backward(module):
        raise NothingToSkip("a part of the model has a backward of its own")
    return tracer.trace(module)
