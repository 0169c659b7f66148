"""Stores compiled graphs for the next start, and loads those of earlier ones (`engine.cache_dir`).

Dynamo captures a model in each process, as its guards say when a graph may run. The result of all later steps (tracing,
rewriting, differentiating, partitioning, lowering) is loaded, if an earlier process compiled the same graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ort_accel.errors import in_a_line
from ort_accel.graph_cache.fingerprint import graph_key
from ort_accel.graph_cache.pickling import NotKeepable, dumped, loaded
from ort_accel.observe.logs import LOG
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report
from ort_accel.reporting.timings import KERNEL_NODES, KERNELS_AWAITED, KERNELS_READY, KERNELS_TRIED, PROGRAM_NODES
from ort_accel.runtime.signed_files import SignedFiles

SUFFIX = "graph"

GRAPHS_LOADED, MADE = "graphs from an earlier start", "graphs kept for the next start"

OF_GENERATED_CODE = (KERNELS_AWAITED, KERNELS_READY, KERNELS_TRIED, KERNEL_NODES, PROGRAM_NODES)
PROCESS_COUNTERS = ("compilations", "cache hits", "cache misses", MADE, *OF_GENERATED_CODE)
"""Counters of this process's own work, which are not stored."""


@dataclass(frozen=True)
class StoredGraph:
    """A compiled graph, with the other results of compiling it."""

    run: Callable[..., Any]
    entries: Report
    """The entries that compiling it added to the report."""
    guards: Sequence[sympy.Basic]
    """Conditions on dynamic sizes under which the graph may run."""
    graphs: int
    seconds: float


class GraphStore:
    """Stores and loads the compiled graphs of one model in a folder."""

    def __init__(self, files: SignedFiles, report: Report) -> None:
        self._files, self._report = files, report

    def name(self, module: fx.GraphModule, inputs: Sequence[Any], context: Sequence[Any]) -> str | None:
        """Return the fingerprint of a graph; None if it cannot be kept."""
        try:
            return graph_key(module, inputs, context)
        except Exception as error:  # the graph is compiled in each process then
            self._not_kept(error)
            return None

    def get(self, name: str, known: Mapping[str, object]) -> StoredGraph | None:
        """Load a compiled graph; None if there is none that this process can use."""
        content = self._files.get(name)
        if content is None:
            return None
        try:
            kept = loaded(content, known)
        except Exception as error:
            self._report.note(f"engine.cache_dir: a kept graph cannot be used and is made again: {in_a_line(error)}")
            return None
        return kept if isinstance(kept, StoredGraph) else None

    def take(self, kept: StoredGraph, shape_env: ShapeEnv | None) -> bool:
        """Use a kept graph, and return True, if its conditions hold; Dynamo guards on them from now on."""
        try:
            if kept.guards and (shape_env is None or not all(map(shape_env.evaluate_expr, kept.guards))):
                return False
        except Exception as error:  # a condition on sizes that this graph does not have
            LOG.debug("conditions of a kept graph: %s", in_a_line(error))
            return False
        self._report.add(kept.entries)
        self._report.counters[GRAPHS_LOADED] += 1
        self._report.note(
            "graphs were taken from an earlier start (engine.cache_dir), with the figures that were measured then"
        )
        return True

    def put(self, name: str, kept: Callable[[], StoredGraph], known: Mapping[str, object]) -> None:
        """Store a compiled graph."""
        try:
            if self._files.put(name, dumped(kept(), known)):
                self._report.counters[MADE] += 1
        except Exception as error:  # something in it belongs to this process alone
            self._not_kept(error)

    def _not_kept(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, NotKeepable) else in_a_line(error)
        self._report.note(f"engine.cache_dir: a graph is not kept for the next start: {reason}")


class CompilationRecord:
    """Records what compiling a graph adds to the report and to the guards."""

    def __init__(self, report: Report, shape_env: ShapeEnv | None) -> None:
        self._report, self._shapes = report, shape_env
        self._before, self._begin = report.graph_entries(), time.perf_counter()
        self._guards = set(self._conditions())
        self._checks = self._other_checks()

    def _conditions(self) -> list[sympy.Basic]:
        return [guard.expr for guard in self._shapes.guards] if self._shapes is not None else []

    def _other_checks(self) -> tuple[int, int]:
        """Count the checks that are not guards on sizes: of inputs that overlap, and of sizes from data."""
        runtime = 0 if self._shapes is None else sum(map(len, self._shapes.deferred_runtime_asserts.values()))
        return len(TracingContext.get().guards_context.aotautograd_guards), runtime

    def done(self, run: Callable[..., Any], graphs: int) -> StoredGraph:
        """Return the compiled graph with its results; `graphs` is the number of compiled graphs."""
        if self._other_checks() != self._checks:
            raise NotKeepable("compiling it led to checks of more than sizes of its inputs")
        guards = [expr for expr in self._conditions() if expr not in self._guards]
        entries = self._report.graph_entries(since=self._before)
        for name in PROCESS_COUNTERS:
            del entries.counters[name]
        if any(item.reason is Reason.ENDED_RUNS for item in entries.fallbacks):
            raise NotKeepable("earlier runs ended in a part of it, which may be forgotten")
        return StoredGraph(run, entries, guards, graphs, time.perf_counter() - self._begin)


def named_parts(module: fx.GraphModule) -> dict[str, Any]:
    """Return a captured graph and its own tensors by the names with which a kept graph refers to them."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {"captured graph": module} | {f"captured graph: {name}": tensor for name, tensor in held.items()}
