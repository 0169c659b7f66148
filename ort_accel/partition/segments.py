"""Cuts a graph into segments: runs of nodes that ONNX Runtime, or PyTorch, executes one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from ort_accel.graph.meta_keys import RUNS_AFTER
from ort_accel.graph.nodes import (
    CHECKS,
    is_data_dependent_scalar,
    is_getitem,
    is_random,
    is_returned,
    is_size,
    is_view,
    is_watch_call,
    output_bytes,
    output_nodes_of,
    writes,
)
from ort_accel.kernels.host_copies import is_host_copy
from ort_accel.partition.assign import Assignment
from ort_accel.reporting.segments import Runner

NEGLIGIBLE_BYTES = 1 << 16


@dataclass
class Cut:
    """Neighbouring nodes of one runner, in order. Views are not among them: each segment repeats those it needs."""

    runner: Runner
    nodes: list[fx.Node]
    called: Collection[fx.Node] = ()
    """Those of them that call a kernel within a session of ONNX Runtime."""
    copied: Collection[fx.Node] = ()
    """Those of the called ones whose results are copied, since the kernel allocates them."""


def keeps_position(node: fx.Node) -> bool:
    """True if a node runs where the graph has it, whatever it reads."""
    return is_watch_call(node) or writes(node) or is_host_copy(node) or is_data_dependent_scalar(node)


def values_read(node: fx.Node, free: set[fx.Node]) -> set[fx.Node]:
    """Returns the inputs and computed values that a node reads, looking through views."""
    return _read_through(node, lambda item: item in free or is_getitem(item))


def _computed_values_read(node: fx.Node, free: set[fx.Node]) -> set[fx.Node]:
    return {item for item in values_read(node, free) if item.op == "call_function" and not is_size(item)}


def _read_through(node: fx.Node, is_transparent: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Returns the nodes that a node reads; in place of a transparent node, those that the transparent node reads."""
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        item = pending.pop()
        if is_transparent(item):
            pending += item.all_input_nodes
        else:
            found.add(item)
    return found


def readers_of(nodes: Iterable[fx.Node], free: set[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Returns for each of the nodes those of them that need its results."""
    readers: dict[fx.Node, set[fx.Node]] = {node: set() for node in nodes}
    for node in readers:
        for source in _computed_values_read(node, free):
            readers[source].add(node)
    return readers


def cut(graph: fx.Graph, assignment: Assignment) -> list[Cut]:
    """Groups nodes so that control changes hands as rarely as the data allows.

    1. Random draws, writes and watched nodes keep their order among each other.
    2. A write, or a move to host memory or back, keeps its position among all nodes. What follows a check of data waits
       for it, so that the first error is eager's.
    3. A node that has to stay behind others begins a segment, unless one session runs what it can of the whole graph:
       a session frees its inputs late.
    4. Independent nodes that increase memory run in the last segment that is early enough for their readers.
    """
    nodes = [node for node in graph.nodes if node in assignment.runner and node not in assignment.free]
    order = _Order(nodes, assignment)
    return _Delay(_as_early_as_possible(nodes, assignment.runner, order), order).cuts()


class _Order:
    """The nodes that must run before each node."""

    def __init__(self, nodes: Sequence[fx.Node], assignment: Assignment) -> None:
        self.before = self._dependencies(nodes, assignment.free)
        """Nodes that run in the same segment or an earlier one."""
        self.segments_before: dict[fx.Node, set[fx.Node]] = {}
        """Nodes that run in an earlier segment."""
        named = {node.name: node for node in nodes}
        for node in nodes:
            if others := {named[name] for name in node.meta.get(RUNS_AFTER, ()) if name in named}:
                if assignment.has_calls:
                    self.before[node] |= others
                else:
                    self.segments_before[node] = others

    def _dependencies(self, nodes: Sequence[fx.Node], free: set[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
        before: dict[fx.Node, set[fx.Node]] = {}
        last_ordered: fx.Node | None = None
        last_fixed: fx.Node | None = None
        last_check: fx.Node | None = None
        for node in nodes:
            dependencies = _computed_values_read(node, free) | {item for item in (last_fixed, last_check) if item}
            if writes(node) or is_host_copy(node):
                dependencies.update(before)
                last_fixed = node
            if writes(node) or is_random(node) or is_watch_call(node):
                if last_ordered is not None:
                    dependencies.add(last_ordered)
                last_ordered = node
            if node.target in CHECKS:
                last_check = node
            before[node] = dependencies
        return before

    def allows(self, node: fx.Node, done: set[fx.Node], done_in_segments: frozenset[fx.Node]) -> bool:
        """True if a node may run now, in a segment that begins behind `done_in_segments`."""
        return self.before[node] <= done and self.segments_before.get(node, done_in_segments) <= done_in_segments


def _as_early_as_possible(nodes: Sequence[fx.Node], runner_of: dict[fx.Node, Runner], order: _Order) -> list[Cut]:
    """Lets each runner in turn run all nodes that can run."""
    done: set[fx.Node] = set()
    cuts: list[Cut] = []
    runner, idle_turns = Runner.PYTORCH, 0
    while nodes:
        taken: list[fx.Node] = []
        left: list[fx.Node] = []
        done_in_segments = frozenset(done)
        for node in nodes:
            if runner_of[node] is runner and order.allows(node, done, done_in_segments):
                taken.append(node)
                done.add(node)
            else:
                left.append(node)
        if taken:
            cuts.append(Cut(runner, taken))
        idle_turns = 0 if taken else idle_turns + 1
        assert idle_turns < len(Runner), f"waits for what nothing gives: {left[0].format_node()}"
        nodes = left
        runner = Runner.ORT if runner is Runner.PYTORCH else Runner.PYTORCH
    return cuts


class _Delay:
    """Moves independent nodes that increase memory to the last segment that is early enough for their readers.

    Run as early as possible, the dropout masks of all layers would exist at once.
    """

    def __init__(self, cuts: Sequence[Cut], order: _Order) -> None:
        self._cuts, self._order = cuts, order
        self._runner = {node: item.runner for item in cuts for node in item.nodes}
        self._segment = {node: index for index, item in enumerate(cuts) for node in item.nodes}
        self._read = {node: self._values_read(node) for node in order.before}
        self._reader_count = Counter(value for values in self._read.values() for value in values)
        self._increases_memory = self._independent_nodes()

    def cuts(self) -> list[Cut]:
        """Returns the segments after all moves."""
        nodes = self._order.before
        others_wait_for = set[fx.Node]().union(*nodes.values())
        independent = self._increases_memory
        side_results = {node for node, increases in independent.items() if not increases and self._is_side_result(node)}
        side_results -= others_wait_for
        self._delay(side_results)
        moved = [Cut(item.runner, []) for item in self._cuts] + [Cut(one, []) for one in Runner]
        for node in side_results:
            earliest = max(self._segment[source] for source in nodes[node])
            runner = self._runner[node]
            self._segment[node] = next(i for i, item in enumerate(moved) if i >= earliest and item.runner is runner)
        for node in nodes:
            moved[self._segment[node]].nodes.append(node)
        return [item for item in moved if item.nodes]

    def _delay(self, side_results: Container[fx.Node]) -> None:
        latest: dict[fx.Node, int] = {}
        for node in reversed(self._order.before):
            if node in side_results:
                continue
            segment = self._segment[node]
            if node in latest and self._increases_memory.get(node):
                candidates = range(latest[node], segment, -1)
                segment = next((i for i in candidates if self._cuts[i].runner is self._runner[node]), segment)
                self._segment[node] = segment
            for source in self._order.before[node]:
                latest[source] = min(latest.get(source, segment), segment)
            for source in self._order.segments_before.get(node, ()):
                latest[source] = min(latest.get(source, segment), segment - 1)

    def _values_read(self, node: fx.Node) -> set[fx.Node]:
        computed = self._order.before
        return _read_through(node, lambda item: item not in computed and (is_view(item) or is_getitem(item)))

    def _independent_nodes(self) -> dict[fx.Node, bool]:
        """Returns the nodes that wait for nothing, or for such nodes alone.

        The value is True if the result is as large as what has to exist for it. A late run saves memory only then.
        """
        independent: dict[fx.Node, bool] = {}
        needed_bytes: dict[fx.Node, int] = {}

        def bytes_for(value: fx.Node) -> int:
            """Returns the bytes that have to exist for a value, which may come late itself."""
            if value not in independent or (self._reader_count[value] > 1 and not is_returned(value)):
                return output_bytes(value)
            return 0 if is_returned(value) else needed_bytes[value]

        for node, sources in self._order.before.items():
            is_bound = keeps_position(node) or node in self._order.segments_before
            if not is_bound and all(independent.get(source) for source in sources):
                needed_bytes[node] = sum(map(bytes_for, self._read[node]))
                independent[node] = needed_bytes[node] - output_bytes(node) < NEGLIGIBLE_BYTES
        return independent

    def _is_side_result(self, node: fx.Node) -> bool:
        """True if only the graph's outputs need a node, and other nodes also read all that it reads.

        The packed bits of a dropout mask are such a node. It runs as soon as the mask is there.
        """
        computed = [value for value in self._read[node] if value in self._read]
        return bool(computed) and not self._reader_count[node] and all(self._reader_count[v] > 1 for v in computed)


@dataclass(frozen=True)
class Body:
    """The nodes that a segment executes, in order, and the values that it needs from outside."""

    inputs: list[fx.Node]
    nodes: list[fx.Node]


def body_of(nodes: Sequence[fx.Node], wanted: Sequence[fx.Node], free: set[fx.Node]) -> Body:
    """Returns the nodes of a segment with the views that they, or the values wanted from it, look through."""
    own = {*nodes, *(part for node in nodes for part in output_nodes_of(node))}
    inputs: dict[fx.Node, None] = {}
    body: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node in body or node in inputs:
            return
        if node in own or node in free or node.op == "get_attr":
            for argument in node.all_input_nodes:
                visit(argument)
            body[node] = None
        else:
            inputs[node] = None

    for node in [*nodes, *wanted]:
        visit(node)
    return Body(list(inputs), list(body))
