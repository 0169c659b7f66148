"""Offload: copying saved values to host memory in the forward and prefetching them in the backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from ort_accel.graph.nodes import is_size, is_view, returned
from ort_accel.graph.symbolic_sizes import hinted_bytes
from ort_accel.kernels.host_copies import own
from ort_accel.recompute.cost import LAUNCH_MS, node_ms
from ort_accel.recompute.joint_graph import (
    backward_nodes,
    forward_nodes,
    insert_call,
    is_tensor,
    output_owners,
    storage_owner,
)
from ort_accel.recompute.offload_schedule import PassTiming, SyncPoint, schedule_offload, schedule_prefetch, stall_ms
from ort_accel.recompute.saved_values import SavedValue, saved_values
from ort_accel.recompute.split_joint_graph import GraphPair

LEAST_BYTES = 2**20
"""Smaller values are not offloaded."""


@dataclass(frozen=True)
class Offloaded:
    """The values that a pair of graphs offloads."""

    values: frozenset[str] = frozenset()
    """Names of the storage owners."""
    bytes: int = 0
    """Bytes in host memory after the forward, at the captured sizes."""
    cost_ms: float = 0.0
    """Milliseconds that a step takes longer, by the cost model."""


class OffloadCandidates:
    """The values of a joint graph that can be offloaded, and the cost of that without recompute."""

    def __init__(self, joint: fx.Graph, num_outputs: int) -> None:
        """The caller receives the first `num_outputs` outputs; these stay on the device."""
        outputs = output_owners(joint, num_outputs)
        saved = [item for item in saved_values(joint) if item.bytes >= LEAST_BYTES and item.node not in outputs]
        forward, backward = forward_nodes(joint), backward_nodes(joint)
        self._forward = PassTiming(_starts_ms(forward), _last_uses(forward))
        self._backward = PassTiming(_starts_ms(backward), _first_uses(backward))
        self.values = {item.node.name: item for item in saved if item.node.name in self._backward.boundary}

    def sites(self) -> list[OffloadSite]:
        """Returns a candidate for each value."""
        return [OffloadSite(value, self) for value in self.values.values()]

    def cost_ms(self, names: Collection[str]) -> float:
        """Returns the milliseconds that a step takes longer if these values are offloaded."""
        return _schedule({name: self.values[name].bytes for name in names}, self._forward, self._backward)[0]


@dataclass(frozen=True)
class OffloadSite:
    """One value that a budget may offload."""

    value: SavedValue
    candidates: OffloadCandidates

    @property
    def name(self) -> str:
        """The name of the value."""
        return self.value.node.name

    @property
    def saved(self) -> tuple[SavedValue, ...]:
        """The values that no longer lie on the device."""
        return (self.value,)

    @property
    def saved_bytes(self) -> int:
        """Bytes that it frees at the captured sizes."""
        return self.value.bytes

    def added_ms(self, offloaded: Collection[str]) -> float:
        """Returns the milliseconds that a step takes longer for it, beside values that are offloaded already."""
        return max(self.candidates.cost_ms([*offloaded, self.name]) - self.candidates.cost_ms(offloaded), 0.0)


def insert_offload(pair: GraphPair, num_outputs: int, names: Collection[str]) -> Offloaded:
    """Let a pair of graphs, which are changed, offload the values with these storage owners.

    If several pieces of a value are saved, each piece is copied by itself. A value whose pieces overlap stays on the
    device, so that no byte is copied twice.
    """
    forward, backward = pair
    nodes, backward_body = _after_inputs(forward.graph), _after_inputs(backward.graph)
    first_uses = _first_uses(backward_body)
    pieces = [node for node in _pieces(forward.graph, num_outputs, names) if node.name in first_uses]
    if not pieces:
        return Offloaded()
    sizes = {node.name: hinted_bytes(node.meta["val"]) for node in pieces}
    owners = {storage_owner(node).name for node in pieces}
    last_uses = _last_uses(nodes)
    after = {node: index for index, node in enumerate(nodes, 1)}
    leaves = {node.name: max(last_uses[storage_owner(node).name], after[node]) for node in pieces}
    out, back = PassTiming(_starts_ms(nodes[:-1]), leaves), PassTiming(_starts_ms(backward_body[:-1]), first_uses)
    cost_ms, offloads, prefetches = _schedule(sizes, out, back)
    _insert_offloads(forward, {node.name: node for node in pieces}, nodes, offloads)
    _insert_prefetches(backward, sizes, backward_body, prefetches)
    return Offloaded(frozenset(owners), sum(sizes.values()), cost_ms)


def _schedule(
    sizes: Mapping[str, int], forward: PassTiming, backward: PassTiming
) -> tuple[float, list[SyncPoint], list[SyncPoint]]:
    """Returns the milliseconds that offload takes, and the sync points of both passes."""
    offloads, prefetches = schedule_offload(forward, sizes), schedule_prefetch(backward, sizes)
    launches_ms = 2 * LAUNCH_MS * len(sizes)
    stalls_ms = stall_ms(forward, offloads, sizes) + stall_ms(backward, prefetches, sizes)
    return launches_ms + stalls_ms, offloads, prefetches


def _pieces(graph: fx.Graph, num_outputs: int, names: Collection[str]) -> list[fx.Node]:
    """Returns the saved nodes with these storage owners, if they do not overlap."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in returned(graph)[num_outputs:]:
        if isinstance(node, fx.Node) and is_tensor(node) and storage_owner(node).name in names:
            found.setdefault(storage_owner(node), []).append(node)
    owner_bytes = {node: hinted_bytes(node.meta["val"]) for node in found}
    return [
        piece
        for node, pieces in found.items()
        if sum(hinted_bytes(piece.meta["val"]) for piece in pieces) <= owner_bytes[node]
        for piece in pieces
    ]


def _insert_offloads(
    module: fx.GraphModule, pieces: Mapping[str, fx.Node], nodes: Sequence[fx.Node], sync_points: list[SyncPoint]
) -> None:
    """Copy pieces to host memory at the sync points, and return the copies in their place."""
    graph, results = module.graph, module.graph.output_node()
    copies: dict[str, fx.Node] = {}
    for point in sync_points:
        with graph.inserting_before(nodes[point.node]):
            for name in point.started:
                value = pieces[name]
                copies[name] = insert_call(graph, own.to_host.default, f"{name}_on_host", value.meta, value)
            for name in point.finished:
                insert_call(graph, own.moved.default, f"{name}_sent", {}, copies[name], pieces[name])
    for name, node in pieces.items():
        results.replace_input_with(node, copies[name])
    module.recompile()


def _insert_prefetches(
    module: fx.GraphModule, names: Iterable[str], nodes: Sequence[fx.Node], sync_points: list[SyncPoint]
) -> None:
    """Take pieces in host memory as inputs, and copy them to the device at the sync points."""
    graph = module.graph
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    on_host = {name: _host_input(graph, inputs[name]) for name in names}
    copies: dict[str, fx.Node] = {}
    for point in sync_points:
        with graph.inserting_before(nodes[point.node]):
            for name in point.started:
                meta, device = inputs[name].meta, inputs[name].meta["val"].device
                copies[name] = insert_call(graph, own.from_host.default, f"{name}_back", meta, on_host[name], device)
            for name in point.finished:
                insert_call(graph, own.moved.default, f"{name}_arrived", {}, copies[name], on_host[name])
    for name in names:
        inputs[name].replace_all_uses_with(copies[name], lambda user: not is_size(user))
        inputs[name].replace_all_uses_with(on_host[name])
        graph.erase_node(inputs[name])
    module.recompile()


def _host_input(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Insert an input for the copy of another one in host memory."""
    with graph.inserting_before(value):
        node = graph.placeholder(f"{value.name}_on_host")
    node.meta = {**value.meta, "val": own.to_host(value.meta["val"])}
    return node


def _after_inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op != "placeholder"]


def _starts_ms(nodes: Iterable[fx.Node]) -> list[float]:
    """Returns the start time of each node, and last the end time of all."""
    return [0.0, *accumulate(map(node_ms, nodes))]


def _last_uses(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """Returns, by storage owner, the position after the last node that computes or reads it. Views read nothing."""
    found: dict[str, int] = {}
    for position, node in enumerate(nodes, 1):
        if not (node.op == "output" or is_view(node) or is_size(node)):
            found.update((storage_owner(item).name, position) for item in (node, *node.all_input_nodes))
    return found


def _first_uses(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """Returns, by storage owner, the position of the first reader."""
    found: dict[str, int] = {}
    for position, node in enumerate(nodes):
        for item in [] if is_size(node) else node.all_input_nodes:
            found.setdefault(storage_owner(item).name, position)
    return found
