"""`engine.cache_dir`: compiled graphs from an earlier start, in the place of what takes most of a start's time.

Dynamo captures a model in each process, since it is what knows when a graph may run. What comes behind it (tracing,
rewriting, differentiating, dividing and lowering a graph) is taken from a file where an earlier process made the same.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._guards import TracingContext

from ort_accel.errors import in_a_line
from ort_accel.graph_cache.fingerprint import graph_key
from ort_accel.graph_cache.pickling import NotKeepable, read_back, written
from ort_accel.reporting import Reason, Report
from ort_accel.runtime.signed_files import SignedFiles

LOG = logging.getLogger("ort_accel")

SUFFIX = "graph"

FOUND, MADE = "graphs from an earlier start", "graphs kept for the next start"

OWN = ("compilations", "cache hits", "cache misses", MADE)
"""Counters that say what this process did itself."""

LISTS, MAPS, COUNTS = ("segments", "races", "notes"), ("features", "memory", "_places"), ("counters", "_fallbacks")


@dataclass(frozen=True)
class Said:
    """What a report says at one moment, or what was added between two."""

    parts: dict[str, Any]

    @staticmethod
    def by(report: Report) -> Said:
        """All that it says of graphs."""
        return Said({name: copy.copy(getattr(report, name)) for name in (*LISTS, *MAPS, *COUNTS)})

    def since(self, before: Said) -> Said:
        """What was added since."""
        parts, old = dict(self.parts), before.parts
        for name in LISTS:
            parts[name] = parts[name][len(old[name]) :]
        for name in MAPS:
            parts[name] = {key: value for key, value in parts[name].items() if old[name].get(key) != value}
        for name in COUNTS:
            parts[name] = Counter({key: count for key, count in (parts[name] - old[name]).items() if key not in OWN})
        return Said(parts)

    def again(self, report: Report) -> None:
        """Say it in another report."""
        for text in self.parts["notes"]:
            report.note(text)
        for name in (*MAPS, *COUNTS):
            getattr(report, name).update(self.parts[name])
        for name in ("segments", "races"):
            getattr(report, name).extend(self.parts[name])


@dataclass(frozen=True)
class Kept:
    """A compiled graph, with what else came of compiling it."""

    run: Callable[..., Any]
    said: Said
    guards: Sequence[Any]
    """What was found out about open sizes: conditions for the graph to run."""
    graphs: int
    seconds: float


class KeptGraphs:
    """The compiled graphs of one model that a folder keeps."""

    def __init__(self, files: SignedFiles, report: Report) -> None:
        self._files, self._report = files, report

    def name(self, module: fx.GraphModule, inputs: Sequence[Any], context: Sequence[Any]) -> str | None:
        """The name of a graph; None where it cannot be kept."""
        try:
            return graph_key(module, inputs, context)
        except Exception as error:  # whatever it is, it is compiled in each process then
            self._not_kept(error)
            return None

    def get(self, name: str, known: Mapping[str, Any]) -> Kept | None:
        """A compiled graph; None where there is none, or none that this process can use."""
        content = self._files.get(name)
        if content is None:
            return None
        try:
            kept = read_back(content, known)
        except Exception as error:
            self._report.note(f"engine.cache_dir: a kept graph cannot be used and is made again: {in_a_line(error)}")
            return None
        return kept if isinstance(kept, Kept) else None

    def take(self, kept: Kept, shapes: Any) -> bool:
        """Take a kept graph up: whether its conditions hold for the sizes at hand, which Dynamo checks from now on."""
        try:
            if not all(shapes.evaluate_expr(guard) for guard in kept.guards):
                return False
        except Exception as error:  # a condition on sizes that this graph does not have
            LOG.debug("conditions of a kept graph: %s", in_a_line(error))
            return False
        kept.said.again(self._report)
        self._report.counters[FOUND] += 1
        self._report.note(
            "graphs were taken from an earlier start (engine.cache_dir), with the figures that were measured then"
        )
        return True

    def put(self, name: str, kept: Callable[[], Kept], known: Mapping[str, Any]) -> None:
        """Keep a compiled graph."""
        try:
            if self._files.put(name, written(kept(), known)):
                self._report.counters[MADE] += 1
        except Exception as error:  # whatever it is that holds something of this process alone
            self._not_kept(error)

    def _not_kept(self, error: Exception) -> None:
        what = str(error) if isinstance(error, NotKeepable) else in_a_line(error)
        self._report.note(f"engine.cache_dir: a graph is not kept for the next start: {what}")


class Making:
    """Watches how a graph is compiled, to keep what came of it."""

    def __init__(self, report: Report, shapes: Any) -> None:
        self._report, self._shapes = report, shapes
        self._said, self._begin = Said.by(report), time.perf_counter()
        self._guards = set(self._conditions())
        self._checks = self._other_checks()

    def _conditions(self) -> list[Any]:
        return [guard.expr for guard in self._shapes.guards] if self._shapes is not None else []

    def _other_checks(self) -> tuple[int, int]:
        """How many things are checked beside sizes: which inputs are the same or overlap, and sizes from data."""
        runtime = 0 if self._shapes is None else sum(map(len, self._shapes.deferred_runtime_asserts.values()))
        return len(TracingContext.get().guards_context.aotautograd_guards), runtime

    def done(self, run: Callable[..., Any], graphs: int) -> Kept:
        """What came of it; so many graphs were compiled."""
        if self._other_checks() != self._checks:
            raise NotKeepable("compiling it led to checks of more than sizes of its inputs")
        guards = [expr for expr in self._conditions() if expr not in self._guards]
        said = Said.by(self._report).since(self._said)
        if any(reason is Reason.ENDED_RUNS for _, reason, _ in said.parts["_fallbacks"]):
            raise NotKeepable("earlier runs ended in a part of it, which may be forgotten")
        return Kept(run, said, guards, graphs, time.perf_counter() - self._begin)


def shapes() -> Any:
    """What is known of the open sizes of the graph that is being captured; None where it has none."""
    mode = TracingContext.get().fake_mode
    return None if mode is None else mode.shape_env


def parts_of(module: fx.GraphModule) -> dict[str, Any]:
    """A captured graph and the tensors that it holds itself, by name: a kept graph refers to them."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {"captured graph": module} | {f"captured graph: {name}": tensor for name, tensor in held.items()}
