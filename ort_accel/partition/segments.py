"""Cutting a graph into segments: runs of nodes that ONNX Runtime, or PyTorch, executes one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ort_accel.graph.meta_keys import RUNS_AFTER
from ort_accel.graph.nodes import (
    bytes_made,
    is_from_data,
    is_part,
    is_random,
    is_returned,
    is_size,
    is_view,
    is_watched,
    tensors_of,
    writes,
)
from ort_accel.kernels.host_copies import is_move
from ort_accel.partition.assign import Refusal
from ort_accel.reporting import Runner

Decide = Callable[[fx.Node], Refusal | None]

OF_NO_ACCOUNT = 1 << 16
"""So few bytes more or less do not matter."""


@dataclass
class Cut:
    """Neighbouring nodes of one runner, in order. Views are not among them: each segment repeats those it needs."""

    runner: Runner
    nodes: list[fx.Node]


@dataclass
class Assignment:
    """For every node of a graph: who runs it, and why not ONNX Runtime."""

    runner: dict[fx.Node, Runner]
    refusals: dict[fx.Node, Refusal]
    free: set[fx.Node]
    """Views that both can run: whoever needs one takes it anew."""


def assign(graph: fx.Graph, decide: Decide) -> Assignment:
    """Decide for every node whose results are read. Sizes are not read of them: they are computed outside."""
    runner: dict[fx.Node, Runner] = {}
    refusals: dict[fx.Node, Refusal] = {}
    free: set[fx.Node] = set()
    needed = _needed(graph)
    for node in graph.nodes:
        if node.op != "call_function" or is_size(node) or node not in needed:
            continue
        if is_part(node):
            if node.args[0] in free:
                free.add(node)
            continue
        refusal = decide(node)
        if refusal is None:
            runner[node] = Runner.ORT
            if is_view(node):
                free.add(node)
        else:
            runner[node], refusals[node] = Runner.PYTORCH, refusal
    return Assignment(runner, refusals, free)


def _needed(graph: fx.Graph) -> set[fx.Node]:
    """What is computed for the outputs, or does more than to give its results."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read = not needed.isdisjoint(node.users)
        if not is_size(node) and (is_read or node.is_impure() or is_random(node) or is_watched(node)):
            needed.add(node)
    return needed


def has_a_place(node: fx.Node) -> bool:
    """Whether a node runs where the graph has it, whatever it reads."""
    return is_watched(node) or writes(node) or is_move(node) or is_from_data(node)


def seen_from(node: fx.Node, free: set[fx.Node]) -> set[fx.Node]:
    """What a node reads, seen through views: inputs, and what is computed."""
    return _seen_through(node, lambda item: item in free or is_part(item))


def sources(node: fx.Node, free: set[fx.Node]) -> set[fx.Node]:
    """What must have run before this node, seen through views."""
    return {item for item in seen_from(node, free) if item.op == "call_function" and not is_size(item)}


def _seen_through(node: fx.Node, is_clear: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """What a node reads; of what is clear, what that reads."""
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        item = pending.pop()
        if is_clear(item):
            pending += item.all_input_nodes
        else:
            found.add(item)
    return found


def readers_of(nodes: Iterable[fx.Node], free: set[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """For each of the nodes, those of them that need its results."""
    readers: dict[fx.Node, set[fx.Node]] = {node: set() for node in nodes}
    for node in readers:
        for source in sources(node, free):
            readers[source].add(node)
    return readers


def cut(graph: fx.Graph, assignment: Assignment) -> list[Cut]:
    """Group nodes so that control changes hands as rarely as the data allows.

    Nodes that draw random numbers, write into their inputs or show them to a subscriber keep their order among each
    other, and a write, or a move to host memory or back, keeps its place among all others. A node that has to stay
    behind others begins a segment of its own: within one, ONNX Runtime chooses the order. What waits for nothing comes
    as late as its first reader needs it, where it takes more memory than it was computed from.
    """
    todo = [node for node in graph.nodes if node in assignment.runner and node not in assignment.free]
    waits = _dependencies(todo, assignment.free)
    behind = _behind(todo)
    done: set[fx.Node] = set()
    cuts: list[Cut] = []
    runner, idle = Runner.PYTORCH, 0
    while todo:
        taken: list[fx.Node] = []
        left: list[fx.Node] = []
        before = frozenset(done)
        for node in todo:
            if assignment.runner[node] is runner and waits[node] <= done and behind.get(node, before) <= before:
                taken.append(node)
                done.add(node)
            else:
                left.append(node)
        if taken:
            cuts.append(Cut(runner, taken))
        idle = 0 if taken else idle + 1
        assert idle < len(Runner), f"waits for what nothing gives: {todo[0].format_node()}"
        todo = left
        runner = Runner.ORT if runner is Runner.PYTORCH else Runner.PYTORCH
    return _delayed(cuts, waits, behind)


def _delayed(
    cuts: Sequence[Cut], waits: dict[fx.Node, set[fx.Node]], behind: Mapping[fx.Node, Collection[fx.Node]]
) -> list[Cut]:
    """Let what waits for nothing, and grows on its way, run in the last segment that is early enough.

    Taken as soon as they could run, the masks of dropout would exist for all layers at once in the forward, and in the
    backward the factors that they become, four times as large.
    """
    runner = {node: item.runner for item in cuts for node in item.nodes}
    place = {node: index for index, item in enumerate(cuts) for node in item.nodes}
    read = {node: _read(node, waits) for node in waits}
    readers = Counter(source for sources_ in read.values() for source in sources_)
    ready = _ready(waits, behind, read, readers)
    waited_for = set[fx.Node]().union(*waits.values())
    following = {node for node, grows in ready.items() if not grows and _follows(node, read, readers)} - waited_for
    latest: dict[fx.Node, int] = {}
    for node in reversed(waits):
        if node in following:
            continue
        if node in latest and ready.get(node):
            early_enough = range(latest[node], place[node], -1)
            place[node] = next((at for at in early_enough if cuts[at].runner is runner[node]), place[node])
        for source in waits[node]:
            latest[source] = min(latest.get(source, len(cuts)), place[node])
        for source in behind.get(node, ()):
            latest[source] = min(latest.get(source, len(cuts)), place[node] - 1)
    moved = [Cut(item.runner, []) for item in cuts] + [Cut(one, []) for one in Runner]
    for node in following:
        there = max(place[source] for source in waits[node])
        place[node] = next(at for at, item in enumerate(moved) if at >= there and item.runner is runner[node])
    for node in waits:
        moved[place[node]].nodes.append(node)
    return [item for item in moved if item.nodes]


def _ready(
    waits: Mapping[fx.Node, set[fx.Node]],
    behind: Mapping[fx.Node, Collection[fx.Node]],
    read: Mapping[fx.Node, set[fx.Node]],
    readers: Mapping[fx.Node, int],
) -> dict[fx.Node, bool]:
    """The nodes that wait for nothing, or for such nodes alone, and whether they are as large as what has to be there
    for them. Where they are not, coming late would keep memory rather than save it."""
    ready: dict[fx.Node, bool] = {}
    needed: dict[fx.Node, int] = {}

    def bytes_for(source: fx.Node) -> int:
        """What has to be there for a value that comes late itself, or is there."""
        if source not in ready:
            return bytes_made(source)
        return 0 if is_returned(source) else needed[source] if readers[source] == 1 else bytes_made(source)

    for node, sources_ in waits.items():
        if not has_a_place(node) and node not in behind and all(ready.get(source) for source in sources_):
            needed[node] = sum(map(bytes_for, read[node]))
            ready[node] = needed[node] - bytes_made(node) < OF_NO_ACCOUNT
    return ready


def _read(node: fx.Node, computed: Collection[fx.Node]) -> set[fx.Node]:
    """What a node reads: what was computed, and inputs, both seen through views."""
    return _seen_through(node, lambda item: item not in computed and (is_view(item) or is_part(item)))


def _follows(node: fx.Node, read: Mapping[fx.Node, set[fx.Node]], readers: Mapping[fx.Node, int]) -> bool:
    """Whether a node is there for the graph's outputs alone, and all that it reads is there for others, too, as with
    the bits of a mask: it comes as soon as that is there."""
    computed = [item for item in read[node] if item in read]
    return bool(computed) and not readers.get(node) and all(readers[item] > 1 for item in computed)


def _behind(nodes: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """For nodes that are held back: what they stay behind."""
    named = {node.name: node for node in nodes}
    return {
        node: {named[name] for name in node.meta[RUNS_AFTER] if name in named}
        for node in nodes
        if RUNS_AFTER in node.meta
    }


def _dependencies(nodes: Sequence[fx.Node], free: set[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    waits: dict[fx.Node, set[fx.Node]] = {}
    ordered: fx.Node | None = None
    fixed: fx.Node | None = None
    seen: list[fx.Node] = []
    for node in nodes:
        waits[node] = sources(node, free) | ({fixed} if fixed else set())
        if writes(node) or is_move(node):
            waits[node].update(seen)
            fixed = node
        if writes(node) or is_random(node) or is_watched(node):
            if ordered is not None:
                waits[node].add(ordered)
            ordered = node
        seen.append(node)
    return waits


@dataclass(frozen=True)
class Body:
    """What a segment executes, in order, and the values it needs from outside."""

    inputs: list[fx.Node]
    nodes: list[fx.Node]


def body_of(nodes: Sequence[fx.Node], wanted: Sequence[fx.Node], free: set[fx.Node]) -> Body:
    """The nodes of a segment together with the views that they, or the values wanted from it, look through."""
    own = {*nodes, *(part for node in nodes for part in tensors_of(node))}
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
