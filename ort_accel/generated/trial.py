"""Runs a segment as it was compiled at first and by other ways in turn, and goes on with the fastest."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from ort_accel.generated.worker import exact_difference
from ort_accel.memory.process_memory import available_bytes
from ort_accel.observe.logs import LOG
from ort_accel.reporting.report import Report
from ort_accel.reporting.timings import KERNELS_READY, KERNELS_TRIED, Race

OPERATORS, CLUSTERS, PROGRAM = "operators", "generated kernels", "a program of Inductor"
"""The ways to run a segment: as it was compiled at first, with kernels for clusters, and all of it by Inductor. The
last two are tried in this order."""

TRYING = "segments are run with and without generated code in turn"
NONE_FASTER = "no generated code was faster than the operators that it replaces"
NONE_BEFORE = "an earlier start found no generated code that is faster (engine.cache_dir)"
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
class Candidate:
    """Another way to run a segment."""

    way: str
    run: OrtSegment | InductorProgram
    condition: str
    """The condition on the symbols under which it may run, in Python."""
    nodes: int
    """The number of nodes that generated code computes."""
    library: bytes = b""
    """The library of the segment's kernels, with their names."""
    kernels: Sequence[str] = ()


class CodeSource(Protocol):
    """The generator, as segments see it."""

    report: Report

    @property
    def ways(self) -> Sequence[str]:
        """The ways that are tried, in their order."""

    def kept(self, segment: OrtSegment) -> tuple[Sequence[str], Candidate | None]:
        """Returns the ways that earlier starts have tried for a segment, and the fastest; None for its operators."""

    def keep(self, segment: OrtSegment, tried: Sequence[str], fastest: Candidate | None) -> None:
        """Keep what is known of a segment for the next start."""

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
        self._fastest: Candidate | None = None
        self.seconds = 0.0
        """The time of its fastest run while it waited; 0 before the first one."""
        self._tried, candidate = generator.kept(segment)
        if candidate is not None:
            self._take_over(candidate)
        elif self._tried and not self.next_way:
            generator.say_without(NONE_BEFORE)
        self.wait()

    def __reduce__(self) -> Any:
        return _restored, (self.segment, self._generator, self.name, self.whole())

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs with these inputs."""
        return self._run(tensors, symbols)

    @property
    def way(self) -> str:
        """The fastest way that is known."""
        return OPERATORS if self._fastest is None else self._fastest.way

    @property
    def next_way(self) -> str:
        """The way that is tried next; empty if none is."""
        left = [way for way in self._generator.ways if way not in self._tried]
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
            self._run = partial(self._waiting, way)
            self._generator.enqueue(self, way)
        else:
            self.graph = self._whole = None

    def _waiting(self, way: str, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs in the fastest known way, and tells the generator how long that took."""
        began = time.perf_counter()
        results = self._base(tensors, symbols)
        seconds = time.perf_counter() - began
        self.seconds = min(self.seconds or seconds, seconds)
        self._generator.ran(seconds, way)
        return results

    def rest(self) -> None:
        """Run in the fastest known way until the next one comes."""
        self._run = self._base

    def give_up(self) -> None:
        """Ask for no other way any more, and keep nothing of it."""
        self.graph = self._whole = None
        self.rest()

    def deliver(self, candidate: Candidate | None, *, is_kept: bool) -> None:
        """Take another way to run; called by another thread.

        Without a candidate there is no such way; unless that `is_kept`, it may be different in the next start.
        """
        if candidate is None:
            self._end(self.next_way, is_kept=is_kept)
            return
        self._generator.report.counters[KERNELS_READY] += 1
        self._generator.say_without(TRYING)
        self._run = _Trial(self, self._base, candidate)

    def decide(self, candidate: Candidate, seconds: dict[str, float]) -> None:
        """Go on with the faster way."""
        is_faster = seconds[candidate.way] <= LEAST_GAIN * seconds[self.way] and not candidate.run.has_given_up
        if is_faster:
            self._take_over(candidate)
        self._generator.report.races.append(Race(self.name, "generated code", candidate.nodes, seconds, self.way))
        times = ", ".join(f"{each * 1e3:.1f} ms with {way}" for way, each in seconds.items())
        LOG.info("generated code for %d nodes of %s: %s; %s go on", candidate.nodes, self.name, times, self.way)
        self._end_trial(candidate)

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Go on without a candidate, which must not run."""
        self._generator.report.note(f"{candidate.way} is not used for {self.name}: {reason}")
        self._end_trial(candidate)

    def _end_trial(self, candidate: Candidate) -> None:
        self._generator.say_without(NONE_FASTER)
        self._generator.report.counters[KERNELS_TRIED] += 1
        self._end(candidate.way, is_kept=True)

    def _end(self, way: str, *, is_kept: bool) -> None:
        """Note that a way was tried, and go on."""
        self._tried = (*self._tried, way)
        if is_kept:
            self._generator.keep(self.segment, self._tried, self._fastest)
        self.wait()

    def _take_over(self, candidate: Candidate) -> None:
        self._base, self._fastest = _Guarded(self._base, candidate), candidate
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

    def __init__(self, watched: WatchedSegment, base: Run, candidate: Candidate) -> None:
        self._watched, self._base, self._candidate = watched, base, candidate
        self._guarded = _Guarded(base, candidate)
        self._runs: dict[str, list[tuple[float, int]]] = {watched.way: [], candidate.way: []}
        """For each run, its seconds, and a measure of the batch's size."""
        self._is_compared = not isinstance(candidate.run, InductorProgram)

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        if not self._guarded.holds(symbols):
            return self._base(tensors, symbols)
        if not self._is_compared:
            return self._compare(tensors, symbols)
        before, other = self._runs.values()
        run, noted = (self._candidate.run, other) if len(other) == len(before) else (self._base, before)
        began = time.perf_counter()
        results = run(tensors, symbols)
        noted.append((time.perf_counter() - began, max(1, math.prod(symbols.values()))))
        if len(before) > TRIED_RUNS:
            self._decide()
        return results

    def _compare(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs both ways with the same inputs, and refuses a program with other results."""
        program = self._candidate.run
        assert isinstance(program, InductorProgram)
        free = available_bytes()
        if free is not None and 3 * program.result_bytes(symbols) > MEMORY_SHARE * free:
            self._watched.refuse(self._candidate, "memory does not suffice to compare its results")
            return self._base(tensors, symbols)
        state, given = torch.get_rng_state(), list(tensors)
        found = list(program(given, symbols))
        torch.set_rng_state(state)
        program.copied = _overlapping(found, tensors)
        for position in program.copied:  # the other way may write over its inputs
            found[position] = found[position].clone()
        results = self._base(tensors, symbols)
        self._is_compared = True
        if refusal := program.error or _difference(found, results):
            self._watched.refuse(self._candidate, refusal)
        return results

    def _decide(self) -> None:
        """Compare the paces, for batches of different sizes, without the first run of either way."""
        before, other = self._runs.values()
        seconds = median(spent for spent, _ in before[1:])
        pace, new_pace = (median(spent / size for spent, size in runs[1:]) for runs in (before, other))
        times = (seconds, seconds * new_pace / pace)
        self._watched.decide(self._candidate, dict(zip(self._runs, times, strict=True)))


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
    sizes = [_size(each) if each.is_floating_point() else 0.0 for each in wanted]
    largest = max(sizes, default=0.0)
    for at, (one, other, size) in enumerate(zip(found, wanted, sizes, strict=True)):
        if text := exact_difference(one, other):
            return f"its result {at} {text}"
        if not other.is_floating_point():
            continue
        off = _size(one - other)
        if off > TOLERANCE[other.dtype] * size + ROUNDINGS * torch.finfo(other.dtype).eps * largest:
            return f"its result {at} is off by {off:.1e} of {size:.1e}"
    return ""


def _size(tensor: torch.Tensor) -> float:
    """Returns the root of the mean square of a tensor's finite elements."""
    finite = tensor[tensor.isfinite()].double()
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0
