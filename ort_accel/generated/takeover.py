"""Compiles generated code for the segments of a model while it trains.

A segment runs as it was compiled at first. A thread describes its clusters, and has their kernels compiled in a process
of its own; later it has the whole segment compiled by Inductor. Once the code is there, runs with and without it take
turns, and the faster way goes on.
"""

from __future__ import annotations

import hashlib
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx, get_num_threads

from ort_accel.errors import in_a_line
from ort_accel.executor.build_model import build
from ort_accel.executor.ort_segment import Fallback, OrtSegment
from ort_accel.executor.program import Run
from ort_accel.generated.builds import build_version, compile_parts, load_kernels
from ort_accel.generated.clusters import LEAST_SAVED_BYTES, Cluster, find_clusters
from ort_accel.generated.program import InductorProgram
from ort_accel.generated.replace import SegmentGraph, replace_clusters
from ort_accel.generated.trial import CLUSTERS, NONE_FASTER, OPERATORS, PROGRAM, Candidate, WatchedSegment
from ort_accel.generated.whole_graph import WholeGraph
from ort_accel.generated.worker import Outcome
from ort_accel.graph_cache.pickling import dumped, loaded
from ort_accel.observe.logs import LOG
from ort_accel.reporting.report import Report, State
from ort_accel.reporting.timings import KERNEL_NODES, KERNELS_AWAITED, PROGRAM_NODES
from ort_accel.runtime.sessions import Sessions
from ort_accel.runtime.signed_files import SignedFiles

FEATURE = "compute.generated.enabled"
NONE_COMPILED = "no code could be generated; the notes say why"

COMPILING = "code is being compiled in the background"
"""The reason in the feature's row while the process runs."""

SUFFIX = "kernels"
"""The ending of files in `engine.cache_dir`."""

BYTES_A_SECOND, CALL_SECONDS = 1e10, 5e-6
"""The speed of memory and the time of a call, by which the time that a cluster can save is estimated."""


def no_more(_: Exception) -> bool:
    """Keeps a segment off its generated kernels once they have failed."""
    return False


@dataclass(frozen=True)
class Kept:
    """The knowledge of a segment, as a file has it."""

    tried: Sequence[str] = ()
    """The ways that were tried beside its operators."""
    way: str = OPERATORS
    """The fastest one."""
    run: bytes = b""
    """The pickled segment or program that runs it in this way."""
    condition: str = "True"
    nodes: int = 0
    library: bytes = b""
    kernels: Sequence[str] = ()


@dataclass
class Queue:
    """Segments that wait for one way to run, and the time that they have run for."""

    delay_seconds: float
    waiting: list[weakref.ref[WatchedSegment]] = field(default_factory=list)
    spent_seconds: float = 0.0


@dataclass(frozen=True)
class GeneratorSettings:
    """The generated code that is wished for, when it is compiled, and where it is kept."""

    workers: int = 1
    delay_seconds: Mapping[str, float] = field(default_factory=lambda: {CLUSTERS: 0.0})
    """The ways to run that are tried, and how long the segments that wait for one run before that."""
    least_share: float = 0.0
    """The share of a run that clusters must be able to save."""
    least_saved_bytes: int = LEAST_SAVED_BYTES
    """The traffic to memory that a cluster must save."""
    operators: frozenset[str] | None = None
    """The only operators that clusters contain, if given."""
    folder: Path | None = None
    """Keeps generated code for the next start."""
    sources: Path | None = None
    """Gets the text of generated code, for people."""


class Generator:
    """Compiles and keeps the generated code of one model."""

    def __init__(self, sessions: Sessions, opset: int, report: Report, settings: GeneratorSettings) -> None:
        self.report, self.settings = report, settings
        self._queues = {way: Queue(delay) for way, delay in self.settings.delay_seconds.items()}
        self._sessions, self._opset, folder = sessions, opset, self.settings.folder
        self._files = SignedFiles(folder, SUFFIX, report) if folder is not None else None
        self._slots = threading.Semaphore(self.settings.workers)
        self._used = weakref.WeakKeyDictionary[WatchedSegment, Candidate]()

    def __reduce__(self) -> Any:
        raise TypeError("a generator belongs to one process")

    @property
    def ways(self) -> Sequence[str]:
        """The ways that are tried, in their order."""
        return list(self._queues)

    def watch(
        self, segment: OrtSegment, graph: SegmentGraph, keeps_address: Callable[[fx.Node], bool], name: str
    ) -> Run:
        """Returns a segment that goes over to generated code."""
        return WatchedSegment(segment, self, name, graph, keeps_address)

    def kept(self, segment: OrtSegment) -> tuple[Sequence[str], Candidate | None]:
        """Returns the ways that earlier starts have tried for a segment, and the fastest; None for its operators."""
        content = self._files.get(self._key(segment)) if self._files is not None else None
        if content is None:
            return (), None
        try:
            kept = loaded(content, {})
            assert isinstance(kept, Kept)
            if not kept.run:
                return kept.tried, None
            load_kernels(kept.library, kept.kernels)
            run = loaded(kept.run, self._objects(segment))
            assert isinstance(run, OrtSegment | InductorProgram)
        except Exception as error:
            self.report.note(f"engine.cache_dir: kept kernels cannot be used and are made again: {in_a_line(error)}")
            return (), None
        return kept.tried, Candidate(kept.way, run, kept.condition, kept.nodes, kept.library, kept.kernels)

    def enqueue(self, watched: WatchedSegment, way: str) -> None:
        """Let a segment wait for a way to run."""
        self._queues[way].waiting.append(weakref.ref(watched))
        self.report.counters[KERNELS_AWAITED] += 1

    def ran(self, seconds: float, way: str) -> None:
        """Add the time of a run of a segment that waits, and begin to compile for all of them when it is time to."""
        queue = self._queues[way]
        if not queue.waiting:
            return
        queue.spent_seconds += seconds
        if queue.spent_seconds < queue.delay_seconds:
            return
        waiting, queue.waiting, queue.spent_seconds = queue.waiting, [], 0.0
        batch = [watched for reference in waiting if (watched := reference()) is not None]
        generate = self._generate_clusters if way == CLUSTERS else self._generate_programs
        thread = threading.Thread(target=self._in_turn, args=(generate, batch), daemon=True, name="ort_accel kernels")
        try:
            thread.start()
        except RuntimeError as error:
            LOG.debug("%s; segments go on waiting for generated code", error)
            queue.waiting += waiting
        else:
            self.report.counters[KERNELS_AWAITED] -= len(waiting) - len(batch)

    def trained(self, seconds: float) -> None:
        """Add the time of a training step that ran no segment: with generated code, it may run them again."""
        for way in self._queues:
            self.ran(seconds, way)

    def _in_turn(self, generate: Callable[[Sequence[WatchedSegment]], None], batch: Sequence[WatchedSegment]) -> None:
        """Compile for some segments in one process."""
        for watched in batch:
            watched.rest()
        with self._slots:
            self.say_without(COMPILING)
            try:
                generate(batch)
            except Exception as error:  # training goes on with the kernels there are
                self._failed(error)
                for watched in batch:
                    watched.give_up()
            self.report.counters[KERNELS_AWAITED] -= len(batch)

    def _generate_clusters(self, batch: Sequence[WatchedSegment]) -> None:
        clusters = [self._worthwhile(watched, self._clusters(watched)) for watched in batch]
        distinct = {name: each[0] for found in clusters for name, each in found.items()}
        library, outcomes = self._compiled(distinct)
        load_kernels(library, [name for name, outcome in outcomes.items() if outcome.is_faster])
        self._note_errors(outcomes)
        for watched, found in zip(batch, clusters, strict=True):
            candidate = partial(self._with_kernels, watched, found, outcomes, library)
            is_final = all(outcomes[name].is_final for name in found)
            self._deliver(watched, candidate, is_kept=bool(found) and is_final)

    def _generate_programs(self, batch: Sequence[WatchedSegment]) -> None:
        named = {f"graph_{at}": watched for at, watched in enumerate(batch)}
        graphs = {name: graph for name, watched in named.items() if (graph := watched.whole()) is not None}
        library, outcomes = self._compiled(graphs)
        self._note_errors(outcomes)
        for name, watched in named.items():
            candidate = partial(self._as_program, watched, name, graphs.get(name), outcomes.get(name), library)
            self._deliver(watched, candidate, is_kept=name not in outcomes or outcomes[name].is_final)

    def _compiled(self, parts: Mapping[str, Cluster] | Mapping[str, WholeGraph]) -> tuple[bytes, dict[str, Outcome]]:
        library, outcomes = compile_parts(parts, self.settings.sources) if parts else (b"", {})
        LOG.debug("generated code: %s", outcomes)
        return library, outcomes

    def _deliver(self, watched: WatchedSegment, candidate: Callable[[], Candidate | None], *, is_kept: bool) -> None:
        """Give a segment what was compiled for it; the others get theirs even where that fails."""
        try:
            watched.deliver(candidate(), is_kept=is_kept)
        except Exception as error:
            self._failed(error)
            watched.give_up()

    def _note_errors(self, outcomes: Mapping[str, Outcome]) -> None:
        """Note each error of the compiler once, and why no code is used if none was compiled."""
        errors = [outcome.error for outcome in outcomes.values() if not outcome.is_final]
        for text in dict.fromkeys(errors):
            self.report.note(f"generated code could not be compiled: {text}")
        self.say_without(NONE_COMPILED if errors and len(errors) == len(outcomes) else NONE_FASTER)

    def _failed(self, error: Exception) -> None:
        self.say_without(NONE_COMPILED)
        self.report.note(f"no kernels were generated: {in_a_line(error)}")
        LOG.debug("no kernels were generated", exc_info=True)

    def say_without(self, reason: str) -> None:
        """Record why no segment uses generated code, unless one does."""
        feature = self.report.features.get(FEATURE)
        if feature is None or feature.state is not State.APPLIED:
            self.report.off(FEATURE, reason)

    def uses(self, watched: WatchedSegment, candidate: Candidate) -> None:
        """Record how a segment runs from now on."""
        self._used[watched] = candidate
        texts = []
        for way, counter, text in RECORDS:
            nodes = [used.nodes for used in self._used.values() if used.way == way]
            self.report.counters[counter] = sum(nodes)
            if nodes:
                texts.append(text.format(nodes=sum(nodes)))
        self.report.applied(FEATURE, "; ".join(texts))

    def _clusters(self, watched: WatchedSegment) -> dict[str, list[Cluster]]:
        """Returns the clusters of a segment by the names of their kernels. Equal clusters share a kernel."""
        graph, by_name = watched.graph, dict[str, list[Cluster]]()
        assert graph is not None
        operators, least = self.settings.operators, self.settings.least_saved_bytes
        for cluster in find_clusters(graph.body.nodes, graph.wanted, graph.called, operators, least):
            by_name.setdefault(_kernel_name(cluster), []).append(cluster)
        return by_name

    def _worthwhile(self, watched: WatchedSegment, clusters: dict[str, list[Cluster]]) -> dict[str, list[Cluster]]:
        """Returns the clusters; none if they can save too small a share of a run to be worth compiling."""
        found = [cluster for equal in clusters.values() for cluster in equal]
        seconds = sum(each.saved_bytes / BYTES_A_SECOND + (len(each.nodes) - 1) * CALL_SECONDS for each in found)
        return clusters if seconds >= self.settings.least_share * watched.seconds else {}

    def _with_kernels(
        self,
        watched: WatchedSegment,
        clusters: Mapping[str, Sequence[Cluster]],
        outcomes: Mapping[str, Outcome],
        library: bytes,
    ) -> Candidate | None:
        """Returns a segment that calls the kernels which are faster; None if none is."""
        chosen = {name: equal for name, equal in clusters.items() if outcomes[name].is_faster}
        graph, segment = watched.graph, watched.segment
        if not chosen or graph is None:
            return None
        changed = replace_clusters(graph, chosen)
        model = build(changed.body, changed.wanted, self._opset, changed.called)
        run = segment.with_model(model, Fallback(segment, no_more), watched.keeps_address)
        condition = _condition([(each.names, outcomes[name]) for name, equal in chosen.items() for each in equal])
        nodes = sum(len(cluster.nodes) for equal in chosen.values() for cluster in equal)
        return Candidate(CLUSTERS, run, condition, nodes, library, list(chosen))

    def _as_program(
        self,
        watched: WatchedSegment,
        name: str,
        graph: WholeGraph | None,
        outcome: Outcome | None,
        library: bytes,
    ) -> Candidate | None:
        """Returns the program that Inductor has written for a segment; None if it has written none."""
        if graph is None or outcome is None:
            return None
        if outcome.error:
            if outcome.is_final:
                self.report.note(f"Inductor compiles no program for {watched.name}: {outcome.error}")
            return None
        run = InductorProgram(watched.segment, name, graph, outcome.wrapper, library)
        return Candidate(PROGRAM, run, _condition([(graph.names, outcome)]), graph.nodes)

    def keep(self, segment: OrtSegment, tried: Sequence[str], fastest: Candidate | None) -> None:
        """Keep what is known of a segment for the next start."""
        if self._files is None:
            return
        kept = Kept(tried)
        if fastest is not None:
            run = dumped(fastest.run, self._objects(segment))
            kept = Kept(tried, fastest.way, run, fastest.condition, fastest.nodes, fastest.library, fastest.kernels)
        self._files.put(self._key(segment), dumped(kept, {}))

    def _key(self, segment: OrtSegment) -> str:
        operators = self.settings.operators and sorted(self.settings.operators)
        parts = build_version(), segment.fingerprint(), operators, get_num_threads()  # which decide who is faster
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def _objects(self, segment: OrtSegment) -> dict[str, object]:
        return {"sessions": self._sessions, "segment": segment, "record": segment.record}


RECORDS = (
    (
        CLUSTERS,
        KERNEL_NODES,
        "generated kernels compute {nodes} nodes, which were calls of single operators",
    ),
    (PROGRAM, PROGRAM_NODES, "programs of Inductor run {nodes} nodes"),
)
"""For each way, the counter of its nodes, and what the feature's row says of them."""


def _kernel_name(cluster: Cluster) -> str:
    return f"cluster_{hashlib.sha256(cluster.source.encode()).hexdigest()[:20]}"


def _condition(code: Sequence[tuple[Sequence[str], Outcome]]) -> str:
    """Returns the condition on the graph's symbols under which all generated code may run.

    For each part of the code, it gets the symbols' names in the graph.
    """
    conditions: set[str] = set()
    for symbols, outcome in code:
        names = {f"s{at}": symbol for at, symbol in enumerate(symbols)}
        conditions |= {f"{symbol} >= 2" for symbol in symbols}
        for text in outcome.conditions:
            conditions.add(f"({re.sub(r'[A-Za-z_]+[0-9]+', lambda found: names[found[0]], text)})")  # noqa: B023
    return " and ".join(sorted(conditions)) or "True"
