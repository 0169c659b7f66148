"""`engine.cache_dir`: takes compiled graphs from an earlier start, and keeps those that are compiled now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from ort_accel.capture.traced_shapes import shape_env
from ort_accel.compiler.autograd_graphs import CompiledGraph
from ort_accel.compiler.row_dispatch import RowDispatch, RowSkippingPolicy, hints
from ort_accel.compiler.settings import Settings
from ort_accel.graph_cache.aot_results import has_records, results_can_be_kept
from ort_accel.graph_cache.store import SUFFIX, CompilationRecord, GraphStore, StoredGraph, named_parts
from ort_accel.reporting.report import Report
from ort_accel.runtime.signed_files import SignedFiles


class CachedGraphs:
    """The compiled graphs of one model that a folder keeps."""

    def __init__(
        self, store: GraphStore, policy: RowSkippingPolicy, report: Report, objects: Callable[[], Mapping[str, object]]
    ) -> None:
        """`objects` returns the objects of this process that a kept graph refers to, by name."""
        self._store, self._policy, self._report, self._objects = store, policy, report, objects

    def name(self, module: fx.GraphModule, inputs: Sequence[object], context: Sequence[object]) -> str | None:
        """Returns the name of a graph that is compiled in this context; None if it cannot be kept."""
        return self._store.name(module, inputs, context)

    def get(self, name: str, module: fx.GraphModule, inputs: Sequence[object]) -> StoredGraph | None:
        """Returns a kept graph for the rows that count in this batch, or for all rows; None if there is none."""
        for variant in self._policy.variants:
            kept = self._store.get(f"{name}-{variant}", {**self._objects(), **named_parts(module)})
            if kept is None:
                continue
            if isinstance(kept.run, RowDispatch) and len(self._policy.variants) > 1:
                self._policy.wants_compact(kept.run.proposal, kept.run.proposal.front(hints(inputs)))
            if variant == self._policy.variants[0]:
                return kept if self._store.take(kept, shape_env()) else None
        return None

    def make(
        self, name: str, module: fx.GraphModule, compile_graphs: Callable[[], tuple[CompiledGraph, int]]
    ) -> CompiledGraph:
        """Compile a graph and keep it. `compile_graphs` also returns how many graphs were compiled for it."""
        objects = {**self._objects(), **named_parts(module)}
        making = CompilationRecord(self._report, shape_env())
        with results_can_be_kept():
            run, graphs = compile_graphs()
        self._store.put(f"{name}-{self._policy.variants[0]}", lambda: making.done(run, graphs), objects)
        return run


def can_cache(settings: Settings) -> bool:
    """True if a folder is named, and neither CUDA, sharded parameters nor torch's version keep graphs from it."""
    is_named = settings.config.engine.cache_dir is not None
    return is_named and settings.parameters_stay and not settings.place.is_cuda and has_records()


def cached_graphs(
    settings: Settings, policy: RowSkippingPolicy, report: Report, objects: Callable[[], Mapping[str, object]]
) -> CachedGraphs | None:
    """Returns the kept graphs of a model; None if none are kept."""
    folder = settings.config.engine.cache_dir
    if folder is None or not can_cache(settings):
        return None
    return CachedGraphs(GraphStore(SignedFiles(folder, SUFFIX, report), report), policy, report, objects)
