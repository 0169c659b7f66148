"""Lets a segment go over to generated kernels while it trains.

A segment runs as it was compiled at first. A thread describes its clusters, and has them compiled in a process of its
own. Once the kernels are there, runs with and without them take turns, and the faster way goes on.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch import fx

from ort_accel.errors import in_a_line
from ort_accel.executor.build_model import build
from ort_accel.executor.ort_segment import Fallback, OrtSegment
from ort_accel.executor.program import Inputs, Outputs, Run, Symbols
from ort_accel.generated.builds import build_version, compile_clusters, load_kernels
from ort_accel.generated.clusters import Cluster, find_clusters
from ort_accel.generated.replace import SegmentGraph, replace_clusters
from ort_accel.generated.worker import Outcome
from ort_accel.graph_cache.pickling import dumped, loaded
from ort_accel.observe.logs import LOG
from ort_accel.reporting import KERNELS_READY, KERNELS_TRIED, Race, Report, State
from ort_accel.runtime.sessions import Sessions
from ort_accel.runtime.signed_files import SignedFiles

FEATURE = "compute.generated.enabled"

COMPILING = "kernels are being compiled in the background"
TRYING = "segments are run with and without generated kernels in turn"
NONE_FASTER = "no generated kernel was faster than the operators that it replaces"
"""The reasons in the feature's row as long as no segment uses kernels."""

SUFFIX = "kernels"
"""The ending of files in `engine.cache_dir`."""

WITHOUT, WITH = "operators", "generated kernels"

TRIED_RUNS = 6
"""Timed runs of either way, before the faster one is chosen."""
LEAST_GAIN = 0.99
"""The share of the former time that runs with generated kernels may take at most."""

BYTES_A_SECOND, CALL_SECONDS = 1e10, 5e-6
"""The speed of memory and the time of a call, by which the time that a cluster can save is estimated."""


def no_more(_: Exception) -> bool:
    """Keeps a segment off its generated kernels once they have failed."""
    return False


@dataclass(frozen=True)
class Kept:
    """The outcome of compiling a segment's clusters, as a file keeps it. Without kernels, nothing was faster."""

    library: bytes = b""
    kernels: Sequence[str] = ()
    condition: str = ""
    nodes: int = 0
    segment: bytes = b""


@dataclass(frozen=True)
class Candidate:
    """A segment with generated kernels."""

    run: OrtSegment
    condition: str
    """The condition on the symbols under which it may run, in Python."""
    nodes: int
    """The number of nodes that generated kernels compute."""


class Generator:
    """Compiles and keeps the generated kernels of one model."""

    def __init__(
        self,
        sessions: Sessions,
        opset: int,
        report: Report,
        workers: int = 1,
        delay_seconds: float = 0.0,
        least_share: float = 0.0,
        operators: frozenset[str] | None = None,
        folder: Path | None = None,
        sources: Path | None = None,
    ) -> None:
        """`folder` keeps kernels for the next start, and `sources` their C++ for people.

        Clusters are compiled when segments have run for `delay_seconds`, if they can save `least_share` of a run. They
        contain only `operators`, if given.
        """
        self.report = report
        self._delay_seconds, self._spent_seconds, self._least_share = delay_seconds, 0.0, least_share
        self._waiting: list[weakref.ref[WatchedSegment]] = []
        self._sessions, self._opset, self._operators, self._sources = sessions, opset, operators, sources
        self._files = SignedFiles(folder, SUFFIX, report) if folder is not None else None
        self._slots = threading.Semaphore(workers)

    def __reduce__(self) -> Any:
        raise TypeError("a generator belongs to one process")

    def watch(
        self, segment: OrtSegment, graph: SegmentGraph, keeps_address: Callable[[fx.Node], bool], name: str
    ) -> Run:
        """Returns a segment that goes over to generated kernels."""
        watched = WatchedSegment(segment, self, name, graph, keeps_address)
        if watched.waits:
            self._waiting.append(weakref.ref(watched))
        return watched

    def kept(self, segment: OrtSegment) -> Candidate | Kept | None:
        """Returns the candidate of an earlier start; `Kept` if nothing was faster then; None if it is not known."""
        content = self._files.get(self._key(segment)) if self._files is not None else None
        if content is None:
            return None
        try:
            kept = loaded(content, {})
            assert isinstance(kept, Kept)
            if not kept.kernels:
                return kept
            load_kernels(kept.library, kept.kernels)
            run = loaded(kept.segment, self._objects(segment))
            assert isinstance(run, OrtSegment)
        except Exception as error:
            self.report.note(f"engine.cache_dir: kept kernels cannot be used and are made again: {in_a_line(error)}")
            return None
        return Candidate(run, kept.condition, kept.nodes)

    def ran(self, seconds: float) -> None:
        """Add the time of a run, and begin to compile the kernels of all waiting segments when it is time to."""
        self._spent_seconds += seconds
        if self._spent_seconds < self._delay_seconds or not self._waiting:
            return
        batch = [watched for waiting in self._waiting if (watched := waiting()) is not None]
        self._waiting, self._spent_seconds = [], 0.0
        for watched in batch:
            watched.rest()
        threading.Thread(target=self._generate, args=(batch,), daemon=True, name="ort_accel kernels").start()

    def _generate(self, batch: Sequence[WatchedSegment]) -> None:
        """Compile the clusters of some segments in one process, and deliver what comes of it."""
        with self._slots:
            self.say_without(COMPILING)
            try:
                clusters = [self._worthwhile(watched, self._clusters(watched)) for watched in batch]
                distinct = {name: each[0] for found in clusters for name, each in found.items()}
                library, outcomes = compile_clusters(distinct, self._sources) if distinct else (b"", {})
                LOG.debug("generated kernels: %s", outcomes)
                load_kernels(library, [name for name, outcome in outcomes.items() if outcome.is_faster])
            except Exception as error:  # training goes on with the kernels there are
                self._failed(error)
                for watched in batch:
                    watched.graph = None
                return
            self.say_without(NONE_FASTER)
            for watched, found in zip(batch, clusters, strict=True):
                try:
                    watched.deliver(*self._candidate(watched, found, outcomes, library))
                except Exception as error:  # the other segments may get theirs
                    self._failed(error)
                    watched.graph = None

    def _failed(self, error: Exception) -> None:
        self.say_without("no kernels could be generated; the notes say why")
        self.report.note(f"no kernels were generated: {in_a_line(error)}")
        LOG.debug("no kernels were generated", exc_info=True)

    def say_without(self, reason: str) -> None:
        """Record why no segment uses generated kernels, unless one does."""
        feature = self.report.features.get(FEATURE)
        if feature is None or feature.state is not State.APPLIED:
            self.report.off(FEATURE, reason)

    def _clusters(self, watched: WatchedSegment) -> dict[str, list[Cluster]]:
        """Returns the clusters of a segment by the names of their kernels. Equal clusters share a kernel."""
        graph, by_name = watched.graph, dict[str, list[Cluster]]()
        assert graph is not None
        for cluster in find_clusters(graph.body.nodes, graph.wanted, graph.called, self._operators):
            by_name.setdefault(_kernel_name(cluster), []).append(cluster)
        return by_name

    def _worthwhile(self, watched: WatchedSegment, clusters: dict[str, list[Cluster]]) -> dict[str, list[Cluster]]:
        """Returns the clusters; none if they can save too small a share of a run to be worth compiling."""
        found = [cluster for equal in clusters.values() for cluster in equal]
        seconds = sum(each.saved_bytes / BYTES_A_SECOND + (len(each.nodes) - 1) * CALL_SECONDS for each in found)
        return clusters if seconds >= self._least_share * watched.seconds else {}

    def _candidate(
        self,
        watched: WatchedSegment,
        clusters: Mapping[str, Sequence[Cluster]],
        outcomes: Mapping[str, Outcome],
        library: bytes,
    ) -> tuple[Candidate | None, Kept | None]:
        chosen = {name: equal for name, equal in clusters.items() if outcomes[name].is_faster}
        graph, segment = watched.graph, watched.segment
        if not chosen or graph is None:
            return None, Kept() if clusters else None
        changed = replace_clusters(graph, chosen)
        model = build(changed.body, changed.wanted, self._opset, changed.called)
        run = segment.with_model(model, Fallback(segment, no_more), watched.keeps_address)
        condition = _condition(chosen, outcomes)
        nodes = sum(len(cluster.nodes) for equal in chosen.values() for cluster in equal)
        content = b"" if self._files is None else dumped(run, self._objects(segment))
        return Candidate(run, condition, nodes), Kept(library, list(chosen), condition, nodes, content)

    def keep(self, segment: OrtSegment, kept: Kept) -> None:
        """Keep the outcome of a segment for the next start."""
        if self._files is not None:
            self._files.put(self._key(segment), dumped(kept, {}))

    def _key(self, segment: OrtSegment) -> str:
        return hashlib.sha256(f"{build_version()}\n{segment.fingerprint()}\n{self._operators}".encode()).hexdigest()

    def _objects(self, segment: OrtSegment) -> dict[str, object]:
        return {"sessions": self._sessions, "segment": segment, "record": segment.record}


def _kernel_name(cluster: Cluster) -> str:
    return f"cluster_{hashlib.sha256(cluster.source.encode()).hexdigest()[:20]}"


def _condition(chosen: Mapping[str, Sequence[Cluster]], outcomes: Mapping[str, Outcome]) -> str:
    """Returns the condition on the graph's symbols under which all kernels may run."""
    conditions: set[str] = set()
    for name, clusters in chosen.items():
        for cluster in clusters:
            names = {f"s{at}": str(symbol.node.expr) for at, symbol in enumerate(cluster.symbols)}
            conditions |= {f"{symbol} >= 2" for symbol in names.values()}
            for text in outcomes[name].conditions:
                conditions.add(f"({re.sub(r'[A-Za-z_]+[0-9]+', lambda found: names[found[0]], text)})")  # noqa: B023
    return " and ".join(sorted(conditions)) or "True"


class WatchedSegment:
    """A segment in one session, which goes over to generated kernels once they are there and faster."""

    def __init__(
        self,
        segment: OrtSegment,
        generator: Generator,
        name: str,
        graph: SegmentGraph | None = None,
        keeps_address: Callable[[fx.Node], bool] = lambda _: False,
    ) -> None:
        self.segment, self.name, self.graph, self.keeps_address = segment, name, graph, keeps_address
        self.inputs = segment.inputs
        self._generator = generator
        self._run: Run = segment
        self.seconds = 0.0
        """The time of the last run without generated kernels."""
        found = generator.kept(segment)
        if isinstance(found, Candidate):
            self._take_over(found)
        elif found is None and graph is not None:
            self._run = self._waiting

    def __reduce__(self) -> Any:
        return WatchedSegment, (self.segment, self._generator, self.name)

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs with these inputs."""
        return self._run(tensors, symbols)

    def _waiting(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs as compiled, and tells the generator how long that took."""
        began = time.perf_counter()
        results = self.segment(tensors, symbols)
        self.seconds = time.perf_counter() - began
        self._generator.ran(self.seconds)
        return results

    @property
    def waits(self) -> bool:
        """True if its kernels are not compiled yet."""
        return self._run == self._waiting

    def rest(self) -> None:
        """Run as compiled until kernels come."""
        self._run = self.segment

    def deliver(self, candidate: Candidate | None, kept: Kept | None) -> None:
        """Take what was compiled, and what is to be kept of it; called by another thread."""
        self.graph = None
        if candidate is None or kept is None:
            if kept is not None:
                self._generator.keep(self.segment, kept)
            return
        self._generator.report.counters[KERNELS_READY] += 1
        self._generator.say_without(TRYING)
        self._run = _Trial(self, candidate, kept)

    def decided(self, candidate: Candidate, kept: Kept, seconds: dict[str, float]) -> None:
        """Go on with the faster way, and keep the decision."""
        is_faster = seconds[WITH] <= LEAST_GAIN * seconds[WITHOUT] and not candidate.run.has_given_up
        report = self._generator.report
        chosen = WITH if is_faster else WITHOUT
        report.races.append(Race(self.name, "generated kernels", candidate.nodes, seconds, chosen))
        if is_faster:
            self._take_over(candidate)
        else:
            self._run = self.segment
            self._generator.say_without(NONE_FASTER)
        report.counters[KERNELS_TRIED] += 1
        self._generator.keep(self.segment, kept if is_faster else Kept())
        times = f"{seconds[WITHOUT] * 1e3:.1f} ms without, {seconds[WITH] * 1e3:.1f} ms with them"
        LOG.info("generated kernels for %d nodes of %s: %s; %s go on", candidate.nodes, self.name, times, chosen)

    def _take_over(self, candidate: Candidate) -> None:
        report = self._generator.report
        self._run = _Guarded(self.segment, candidate)
        report.counters["nodes in generated kernels"] += candidate.nodes
        count = report.counters["nodes in generated kernels"]
        report.applied(FEATURE, f"generated kernels compute {count} nodes, which were calls of single operators")


class _Guarded:
    """Runs a candidate where its condition holds, and else the segment as it was compiled."""

    def __init__(self, segment: OrtSegment, candidate: Candidate) -> None:
        self._segment, self._candidate = segment, candidate
        names = sorted(set(re.findall(r"[A-Za-z_]+[0-9]+", candidate.condition)))
        self._names = names
        self._holds: Callable[..., bool] = eval(f"lambda {', '.join(names)}: {candidate.condition}", {"math": math})

    def holds(self, symbols: Symbols) -> bool:
        return bool(self._holds(*map(symbols.__getitem__, self._names)))

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        run = self._candidate.run if self.holds(symbols) else self._segment
        return run(tensors, symbols)


class _Trial:
    """Lets runs with and without generated kernels take turns, and measures them."""

    def __init__(self, watched: WatchedSegment, candidate: Candidate, kept: Kept) -> None:
        self._watched, self._candidate, self._kept = watched, candidate, kept
        self._guarded = _Guarded(watched.segment, candidate)
        self._paces: dict[str, list[float]] = {WITHOUT: [], WITH: []}
        self._seconds: dict[str, list[float]] = {WITHOUT: [], WITH: []}
        self._is_turn = True

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        if not self._guarded.holds(symbols):
            return self._watched.segment(tensors, symbols)
        way, run = (WITH, self._candidate.run) if self._is_turn else (WITHOUT, self._watched.segment)
        self._is_turn = not self._is_turn
        began = time.perf_counter()
        results = run(tensors, symbols)
        spent = time.perf_counter() - began
        self._seconds[way].append(spent)
        self._paces[way].append(spent / max(1, math.prod(symbols.values())))
        if all(len(paces) > TRIED_RUNS for paces in self._paces.values()):
            self._decide()
        return results

    def _decide(self) -> None:
        """Compare the paces, for batches of different sizes, without the first run of either way."""
        paces = {way: median(paces[1:]) for way, paces in self._paces.items()}
        seconds = median(self._seconds[WITHOUT][1:])
        found = {WITHOUT: seconds, WITH: seconds * paces[WITH] / paces[WITHOUT]}
        self._watched.decided(self._candidate, self._kept, found)
