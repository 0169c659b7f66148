"""Moving what the forward keeps into host memory until the backward needs it: what can be moved, and the two graphs
with these moves in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx

from ort_accel.graph.nodes import is_size, is_view, returned
from ort_accel.graph.symbolic_sizes import hinted_bytes
from ort_accel.kernels.host_copies import own
from ort_accel.recompute.cost import START_MS, milliseconds
from ort_accel.recompute.joint_graph import backward_nodes, forward_nodes, is_tensor, owner
from ort_accel.recompute.offload_schedule import Station, Way, coming, leaving, waiting
from ort_accel.recompute.saved_values import Kept, stash
from ort_accel.recompute.split_joint_graph import Pair

LEAST_BYTES = 2**20
"""Smaller values stay: what they free is not worth a place in the queue."""


@dataclass(frozen=True)
class Moved:
    """What two graphs move."""

    values: frozenset[str] = frozenset()
    """The names of the values that own the memory."""
    bytes: int = 0
    """How much lies in host memory when the forward has ended, at the sizes that the graph was captured with."""
    cost: float = 0.0
    """Milliseconds that a step takes longer for it, as the cost model has it."""


class Movable:
    """The values of a joint graph that can be moved, and what that costs while nothing is computed again."""

    def __init__(self, joint: fx.Graph, wanted: int) -> None:
        """The first `wanted` outputs are the caller's; their memory stays where it is."""
        given = {owner(node) for node in returned(joint)[:wanted] if isinstance(node, fx.Node)}
        kept = [item for item in stash(joint) if item.hint >= LEAST_BYTES and item.node not in given]
        forward, backward = forward_nodes(joint), backward_nodes(joint)
        self._out = Way(_clock(forward), _last_uses(forward))
        self._back = Way(_clock(backward), _first_uses(backward))
        self.values = {item.node.name: item for item in kept if item.node.name in self._back.at}

    def moves(self) -> list[Move]:
        """Each of them by itself."""
        return [Move(kept, self) for kept in self.values.values()]

    def cost(self, names: Collection[str]) -> float:
        """The milliseconds that a step takes longer if these are moved."""
        return _cost({name: self.values[name].hint for name in names}, self._out, self._back)[0]


@dataclass(frozen=True)
class Move:
    """One value that can be moved, as one of the places that a budget chooses from."""

    kept: Kept
    movable: Movable

    @property
    def name(self) -> str:
        """The value's."""
        return self.kept.node.name

    @property
    def saved(self) -> tuple[Kept, ...]:
        """What no longer lies on the device."""
        return (self.kept,)

    @property
    def hint(self) -> int:
        """Bytes of it, at the sizes that the graph was captured with."""
        return self.kept.hint

    def cost_beside(self, others: Collection[str]) -> float:
        """The milliseconds that a step takes longer for this one, where others are moved already."""
        return max(self.movable.cost([*others, self.name]) - self.movable.cost(others), 0.0)


def move(pair: Pair, wanted: int, chosen: Collection[str]) -> Moved:
    """Let a pair of graphs, which are changed, move the chosen values, by the names of what owns the memory.

    A value of which several pieces are kept is moved piece by piece; where pieces overlap it stays, so that nothing is
    moved twice.
    """
    forward, backward = pair
    nodes, later = _behind_inputs(forward.graph), _behind_inputs(backward.graph)
    back = _first_uses(later)
    pieces = [node for node in _pieces(forward.graph, wanted, chosen) if node.name in back]
    if not pieces:
        return Moved()
    sizes = {node.name: hinted_bytes(node.meta["val"]) for node in pieces}
    owners = {owner(node).name for node in pieces}
    last = _last_uses(nodes)
    place = {node: index for index, node in enumerate(nodes, 1)}
    out = {node.name: max(last[owner(node).name], place[node]) for node in pieces}
    cost, leave, come = _cost(sizes, Way(_clock(nodes[:-1]), out), Way(_clock(later[:-1]), back))
    _send(forward, {node.name: node for node in pieces}, nodes, leave)
    _fetch(backward, sizes, later, come)
    return Moved(frozenset(owners), sum(sizes.values()), cost)


def _cost(sizes: Mapping[str, int], out: Way, back: Way) -> tuple[float, list[Station], list[Station]]:
    """The milliseconds that moves take, and the stations of both graphs."""
    leave, come = leaving(out, sizes), coming(back, sizes)
    begun = 2 * START_MS * len(sizes)
    return begun + waiting(out, leave, sizes) + waiting(back, come, sizes), leave, come


def _pieces(graph: fx.Graph, wanted: int, chosen: Collection[str]) -> list[fx.Node]:
    """What is kept for the backward of these values."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in returned(graph)[wanted:]:
        if isinstance(node, fx.Node) and is_tensor(node) and owner(node).name in chosen:
            found.setdefault(owner(node), []).append(node)
    whole = {node: hinted_bytes(node.meta["val"]) for node in found}
    return [
        piece
        for node, pieces in found.items()
        if sum(hinted_bytes(piece.meta["val"]) for piece in pieces) <= whole[node]
        for piece in pieces
    ]


def _send(module: fx.GraphModule, pieces: Mapping[str, fx.Node], nodes: Sequence[fx.Node], way: list[Station]) -> None:
    """Move pieces out at their stations, and return where they are then."""
    graph, results = module.graph, module.graph.output_node()
    moved: dict[str, fx.Node] = {}
    for station in way:
        with graph.inserting_before(nodes[station.node]):
            for name in station.begun:
                value = pieces[name]
                moved[name] = _made(graph, own.to_host.default, value.meta, f"{name}_on_host", value)
            for name in station.ended:
                _made(graph, own.moved.default, {}, f"{name}_sent", moved[name], pieces[name])
    for name, node in pieces.items():
        results.replace_input_with(node, moved[name])
    module.recompile()


def _fetch(module: fx.GraphModule, names: Iterable[str], nodes: Sequence[fx.Node], way: list[Station]) -> None:
    """Take pieces as they lie in host memory, and move them back at their stations."""
    graph = module.graph
    given = {node.name: node for node in graph.find_nodes(op="placeholder")}
    kept = {name: _on_host(graph, given[name]) for name in names}
    moved: dict[str, fx.Node] = {}
    for station in way:
        with graph.inserting_before(nodes[station.node]):
            for name in station.begun:
                meta, device = given[name].meta, given[name].meta["val"].device
                moved[name] = _made(graph, own.from_host.default, meta, f"{name}_back", kept[name], device)
            for name in station.ended:
                _made(graph, own.moved.default, {}, f"{name}_arrived", moved[name], kept[name])
    for name in names:
        given[name].replace_all_uses_with(moved[name], lambda user: not is_size(user))
        given[name].replace_all_uses_with(kept[name])
        graph.erase_node(given[name])
    module.recompile()


def _on_host(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """An input in the place of another one, whose value lies in host memory."""
    with graph.inserting_before(value):
        node = graph.placeholder(f"{value.name}_on_host")
    node.meta = {**value.meta, "val": own.to_host(value.meta["val"])}
    return node


def _made(graph: fx.Graph, target: Any, meta: Mapping[str, Any], name: str, *args: Any) -> fx.Node:
    node = graph.create_node("call_function", target, args, {}, name)
    values = fx.map_arg(args, lambda item: item.meta["val"])
    node.meta = {**meta, "val": target(*values)}
    return node


def _behind_inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op != "placeholder"]


def _clock(nodes: Iterable[fx.Node]) -> list[float]:
    """When each node begins, and when the last one ends."""
    return [0.0, *accumulate(map(milliseconds, nodes))]


def _last_uses(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """For values by the name of what owns the memory: the place behind the last reader, or behind what makes it. Views,
    which are taken anew, read nothing."""
    found: dict[str, int] = {}
    for place, node in enumerate(nodes, 1):
        if not (node.op == "output" or is_view(node) or is_size(node)):
            found.update((owner(item).name, place) for item in (node, *node.all_input_nodes))
    return found


def _first_uses(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """For values by the name of what owns the memory: the place of the first reader."""
    found: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for item in [] if is_size(node) else node.all_input_nodes:
            found.setdefault(owner(item).name, place)
    return found
