"""Runs a segment as it was compiled at first and by other ways in turn, and goes on with the fastest."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch
from torch import fx

from ort_accel.executor.ort_segment import OrtSegment
from ort_accel.executor.program import Inputs, Outputs, Run, Symbols
from ort_accel.generated.description import NotDescribable
from ort_accel.generated.program import InductorProgram
from ort_accel.generated.replace import SegmentGraph
from ort_accel.generated.whole_graph import WholeGraph, whole_graph
from ort_accel.memory.process_memory import available_bytes
from ort_accel.observe.logs import LOG
from ort_accel.reporting import KERNELS_READY, KERNELS_TRIED, Race, Report

OPERATORS, CLUSTERS, PROGRAM = "operators", "generated kernels", "a program of Inductor"
"""The ways to run a segment: as it was compiled at first, with kernels for clusters, and all of it by Inductor. The
last two are tried in this order."""

TRYING = "segments are run with and without generated code in turn"
NONE_FASTER = "no generated code was faster than the operators that it replaces"
"""The reasons in the feature's row as long as no segment uses generated code."""

TRIED_RUNS = 6
"""Timed runs of either way, before the faster one is chosen."""
LEAST_GAIN = 0.99
"""The share of the former time that runs in another way may take at most."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The allowed distance of a program's result from the segment's, as a share of its size."""
ROUNDINGS = 16
"""The number of rounding errors of the largest result that is allowed beside that."""
MEMORY_SHARE = 0.5
"""The share of the free memory that the comparison of results may take."""


@dataclass(frozen=True)
class Kept:
    """What is known of a segment, as a file keeps it."""

    tried: tuple[str, ...] = ()
    """The ways that were tried beside its operators."""
    way: str = OPERATORS
    """The fastest one."""
    run: bytes = b""
    """The pickled segment or program that runs it in this way."""
    condition: str = "True"
    nodes: int = 0
    library: bytes = b""
    """The library of the segment's kernels, with their names."""
    kernels: Sequence[str] = ()


@dataclass(frozen=True)
class Candidate:
    """Another way to run a segment."""

    way: str
    run: OrtSegment | InductorProgram
    condition: str
    """The condition on the symbols under which it may run, in Python."""
    nodes: int
    """The number of nodes that generated code computes."""


class CodeSource(Protocol):
    """The generator, as segments see it."""

    report: Report

    @property
    def ways(self) -> Sequence[str]:
        """The ways that are tried, in their order."""

    def kept(self, segment: OrtSegment) -> tuple[Kept, Candidate | None]:
        """Returns what earlier starts have found out about a segment, and the way to run it that was the fastest."""

    def keep(self, segment: OrtSegment, kept: Kept) -> None:
        """Keep what is known of a segment for the next start."""

    def pickled(self, segment: OrtSegment, run: OrtSegment | InductorProgram) -> bytes:
        """Returns another way to run a segment as a file keeps it."""

    def enqueue(self, watched: WatchedSegment, way: str) -> None:
        """Let a segment wait for a way to run."""

    def ran(self, seconds: float, way: str) -> None:
        """Add the time of a run of a segment that waits."""

    def uses(self, watched: WatchedSegment, candidate: Candidate) -> None:
        """Record how a segment runs from now on."""

    def say_without(self, reason: str) -> None:
        """Record why no segment uses generated code, unless one does."""


class WatchedSegment:
    """A segment in one session, which goes over to generated code once that is there and faster."""

    def __init__(
        self,
        segment: OrtSegment,
        generator: CodeSource,
        name: str,
        graph: SegmentGraph | None = None,
        keeps_address: Callable[[fx.Node], bool] = lambda _: False,
        whole: WholeGraph | None = None,
    ) -> None:
        """A kept graph has no nodes any more; `whole` describes it then, if that is possible."""
        self._whole = whole
        self.segment, self.name, self.graph, self.keeps_address = segment, name, graph, keeps_address
        self.inputs = segment.inputs
        self._generator = generator
        self._base: Run = segment
        """The fastest way that is known."""
        self._run: Run = segment
        self._way = OPERATORS
        self.seconds = 0.0
        """The time of the last run while it waited."""
        self._kept, candidate = generator.kept(segment)
        if candidate is not None:
            self._take_over(candidate)
        self.wait()

    def __reduce__(self) -> Any:
        return _restored, (self.segment, self._generator, self.name, self.whole())

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs with these inputs."""
        return self._run(tensors, symbols)

    @property
    def next_way(self) -> str:
        """The way that is tried next; empty if none is."""
        left = [way for way in self._generator.ways if way not in self._kept.tried]
        is_possible = {CLUSTERS: self.graph is not None, PROGRAM: self.graph is not None or self._whole is not None}
        return next((way for way in left if is_possible[way]), "")

    def whole(self) -> WholeGraph | None:
        """Returns the description of the segment; None if a program is not tried, or cannot be."""
        if self._whole is None and self.graph is not None and PROGRAM in self._generator.ways:
            try:
                self._whole = whole_graph(self.segment, self.graph)
            except NotDescribable as error:
                LOG.debug("%s is not compiled by Inductor: %s", self.name, error)
        return self._whole

    def wait(self) -> None:
        """Run in the fastest known way, and ask for the next one."""
        self._run = self._base
        if way := self.next_way:
            self._run = self._waiting
            self._generator.enqueue(self, way)
        else:
            self.graph = self._whole = None

    def _waiting(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs in the fastest known way, and tells the generator how long that took."""
        began = time.perf_counter()
        results = self._base(tensors, symbols)
        self.seconds = time.perf_counter() - began
        self._generator.ran(self.seconds, self.next_way)
        return results

    def rest(self) -> None:
        """Run in the fastest known way until the next one comes."""
        self._run = self._base

    def give_up(self) -> None:
        """Ask for no other way any more, and keep nothing of it."""
        self.graph = self._whole = None
        self.rest()

    def deliver(self, candidate: Candidate | None, kept: Kept | None) -> None:
        """Take another way to run, and what is to be kept of it; called by another thread.

        Without a candidate there is no such way; without `kept`, that may be different in the next start.
        """
        if candidate is not None and kept is not None:
            self._generator.report.counters[KERNELS_READY] += 1
            self._generator.say_without(TRYING)
            self._run = _Trial(self, self._base, self._way, candidate, kept)
            return
        self._tried(self.next_way, self._kept, is_kept=kept is not None)

    def decided(self, candidate: Candidate, kept: Kept, seconds: dict[str, float], refusal: str = "") -> None:
        """Go on with the faster way, and keep the decision. With a refusal, the candidate must not run."""
        report = self._generator.report
        is_faster = False
        if seconds:
            is_faster = seconds[candidate.way] <= LEAST_GAIN * seconds[self._way] and not candidate.run.has_given_up
            chosen = candidate.way if is_faster else self._way
            report.races.append(Race(self.name, "generated code", candidate.nodes, seconds, chosen))
            times = ", ".join(f"{each * 1e3:.1f} ms with {way}" for way, each in seconds.items())
            LOG.info("generated code for %d nodes of %s: %s; %s go on", candidate.nodes, self.name, times, chosen)
        else:
            report.note(f"{candidate.way} is not used for {self.name}: {refusal}")
        if is_faster:
            self._take_over(candidate)
            kept = replace(kept, run=self._generator.pickled(self.segment, candidate.run))
        else:
            self._generator.say_without(NONE_FASTER)
        report.counters[KERNELS_TRIED] += 1
        self._tried(candidate.way, kept if is_faster else self._kept)

    def _tried(self, way: str, kept: Kept, *, is_kept: bool = True) -> None:
        """Note that a way was tried, and go on."""
        self._kept = replace(kept, tried=(*self._kept.tried, way))
        if is_kept:
            self._generator.keep(self.segment, self._kept)
        self.wait()

    def _take_over(self, candidate: Candidate) -> None:
        self._base = self._run = _Guarded(self._base, candidate)
        self._way = candidate.way
        self._generator.uses(self, candidate)


def _restored(segment: OrtSegment, generator: CodeSource, name: str, whole: WholeGraph | None) -> WatchedSegment:
    return WatchedSegment(segment, generator, name, whole=whole)


class _Guarded:
    """Runs a candidate where its condition holds, and else the segment as it was."""

    def __init__(self, base: Run, candidate: Candidate) -> None:
        self._base, self._candidate = base, candidate
        names = sorted(set(re.findall(r"[A-Za-z_]+[0-9]+", candidate.condition)))
        self._names = names
        self._holds: Callable[..., bool] = eval(f"lambda {', '.join(names)}: {candidate.condition}", {"math": math})

    def holds(self, symbols: Symbols) -> bool:
        return bool(self._holds(*map(symbols.__getitem__, self._names)))

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        run = self._candidate.run if self.holds(symbols) else self._base
        return run(tensors, symbols)


class _Trial:
    """Lets two ways take turns, and measures them."""

    def __init__(self, watched: WatchedSegment, base: Run, way: str, candidate: Candidate, kept: Kept) -> None:
        self._watched, self._base, self._candidate, self._kept = watched, base, candidate, kept
        self._guarded = _Guarded(base, candidate)
        self._paces: dict[str, list[float]] = {way: [], candidate.way: []}
        self._seconds: dict[str, list[float]] = {way: [], candidate.way: []}
        self._way = way
        self._is_turn = True
        self._is_compared = not isinstance(candidate.run, InductorProgram)

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        if not self._guarded.holds(symbols):
            return self._base(tensors, symbols)
        if not self._is_compared:
            return self._compare(tensors, symbols)
        way, run = (self._candidate.way, self._candidate.run) if self._is_turn else (self._way, self._base)
        self._is_turn = not self._is_turn
        began = time.perf_counter()
        results = run(tensors, symbols)
        spent = time.perf_counter() - began
        self._seconds[way].append(spent)
        self._paces[way].append(spent / max(1, math.prod(symbols.values())))
        if all(len(paces) > TRIED_RUNS for paces in self._paces.values()):
            self._decide()
        return results

    def _compare(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs both ways with the same inputs, and refuses a program with other results."""
        program = self._candidate.run
        assert isinstance(program, InductorProgram)
        free = available_bytes()
        if free is not None and 3 * program.result_bytes(symbols) > MEMORY_SHARE * free:
            self._watched.decided(self._candidate, self._kept, {}, "memory does not suffice to compare its results")
            return self._base(tensors, symbols)
        state, given = torch.get_rng_state(), list(tensors)
        found = list(program(given, symbols))
        torch.set_rng_state(state)
        if not program.has_given_up:
            program.copied = _overlapping(found, tensors)
        for position in program.copied:  # the other way may write over its inputs
            found[position] = found[position].clone()
        results = self._base(tensors, symbols)
        self._is_compared = True
        refusal = _difference(found, results)
        if program.has_given_up:
            refusal = program.error
        if refusal:
            self._watched.decided(self._candidate, self._kept, {}, refusal)
        return results

    def _decide(self) -> None:
        """Compare the paces, for batches of different sizes, without the first run of either way."""
        paces = {way: median(paces[1:]) for way, paces in self._paces.items()}
        seconds = median(self._seconds[self._way][1:])
        found = {self._way: seconds, self._candidate.way: seconds * paces[self._candidate.way] / paces[self._way]}
        self._watched.decided(self._candidate, self._kept, found)


def _overlapping(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[int]:
    """Returns the positions of results in the memory of an input or of an earlier result. Results have no gaps."""
    found: list[int] = []
    given = {item.untyped_storage().data_ptr() for item in inputs if item.numel()}
    taken: list[tuple[int, int]] = []
    for position, item in enumerate(results):
        begin, end = item.data_ptr(), item.data_ptr() + item.nbytes
        is_taken = any(begin < other_end and other_begin < end for other_begin, other_end in taken)
        if item.numel() and (is_taken or item.untyped_storage().data_ptr() in given):
            found.append(position)
        taken.append((begin, end))
    return found


def _difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str:
    """Returns how results differ; nothing if they are the same but for rounding.

    Some results consist of rounding errors alone, such as the gradient of a bias before a softmax. They may differ by
    rounding errors of the largest ones.
    """
    largest = max((_size(each) for each in wanted if each.is_floating_point()), default=0.0)
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"its result {at} has another type or shape"
        if not other.is_floating_point():
            if not torch.equal(one, other):
                return f"its result {at} is another one"
            continue
        if not torch.equal(one.isfinite(), other.isfinite()):
            return f"its result {at} has other infinities or NaN"
        off, size = _size(one - other), _size(other)
        if off > TOLERANCE[other.dtype] * size + ROUNDINGS * torch.finfo(other.dtype).eps * largest:
            return f"its result {at} is off by {off:.1e} of {size:.1e}"
    return ""


def _size(tensor: torch.Tensor) -> float:
    """Returns the root of the mean square of a tensor's finite elements."""
    finite = tensor[tensor.isfinite()].double()
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0
