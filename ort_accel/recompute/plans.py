"""Plans: groups of like operators that can be computed again, so that what they gave need not be kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import torch
from torch import fx

from ort_accel.config.plan_text import Plan
from ort_accel.errors import OrtAccelError
from ort_accel.graph.nodes import is_view
from ort_accel.memory_records import PlanKind
from ort_accel.recompute.cost import milliseconds
from ort_accel.recompute.joint_graph import Bytes, inputs_of, is_lasting, owner, whole
from ort_accel.recompute.onnx_names import cluster_of, may_repeat, packet
from ort_accel.recompute.saved_values import Kept, stash
from ort_accel.recompute.transformer_layers import Layers

aten = torch.ops.aten

MOST_NODES = 50
"""A plan that would repeat more than this is none."""

_SHOWN = 8


@dataclass(frozen=True)
class Place:
    """One place in the graph where a cluster is found."""

    cluster: str
    kind: PlanKind
    nodes: frozenset[fx.Node]
    """The operators that are computed again."""
    saved: tuple[Kept, ...]
    instead: tuple[Kept, ...] = ()
    """For a compromise: values of a smaller type, which are kept instead."""
    cost: float = 0.0
    """Milliseconds that computing again takes, as the cost model has it."""

    @property
    def hint(self) -> int:
        """Bytes saved at the sizes that the graph was captured with."""
        return sum(item.hint for item in self.saved) - sum(item.hint for item in self.instead)

    @property
    def bytes(self) -> Bytes:
        """Bytes saved, with symbols where sizes can change."""
        return sum(item.bytes for item in self.saved) - sum(item.bytes for item in self.instead)


@dataclass
class Option:
    """All places of one cluster, in the order of the graph: what one line of the plan table is about."""

    cluster: str
    kind: PlanKind
    places: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class Probe:
    """How far plans are searched for."""

    advanced: bool
    within_layers: bool

    @classmethod
    def parse(cls, text: str) -> Probe:
        """From `L:B`."""
        level, _, border = text.partition(":")
        return cls(level == "1", border == "1")


def find_plans(joint: fx.Graph, layers: Layers, probe: Probe) -> list[Option]:
    """Every option of a joint graph, those that save most first."""
    search = _Search(joint, layers, probe)
    options: dict[tuple[str, int], Option] = {}
    for place in search.places():
        key = (place.cluster, place.kind)
        options.setdefault(key, Option(*key)).places.append(place)
    return sorted(options.values(), key=lambda option: -sum(place.hint for place in option.places))


class _Search:
    """Walks up from every value that is kept."""

    def __init__(self, joint: fx.Graph, layers: Layers, probe: Probe) -> None:
        self._advanced = probe.advanced
        kept = stash(joint)
        self._anyway = {item.node for item in kept} | (layers.kept if probe.within_layers else set())
        self._fixed = layers.kept if probe.within_layers else set()
        self._made: dict[fx.Node, list[Kept]] = defaultdict(list)
        for item in kept:
            self._made[whole(item.node)].append(item)
        self._place = {node: index for index, node in enumerate(joint.nodes)}
        self._hidden = _depends_on_numbers(joint)

    def places(self) -> Iterable[Place]:
        for operator, saved in self._made.items():
            if any(item.node in self._fixed for item in saved):
                continue
            found = self._walk(operator, compromise=False)
            if found is not None:
                yield self._described(PlanKind.RECOMPUTE, found[0], saved, found[1])
                continue
            found = self._walk(operator, compromise=True)
            if found is not None:
                place = self._described(PlanKind.COMPROMISE, found[0], saved, found[1])
                if place.hint > 0:
                    yield place

    def _walk(self, operator: fx.Node, compromise: bool) -> tuple[set[fx.Node], list[fx.Node]] | None:
        """The nodes from an operator up to what is there anyway; None if that cannot be, or is too much."""
        found: set[fx.Node] = set()
        instead: dict[fx.Node, None] = {}
        pending = [operator]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            if not may_repeat(node, self._advanced) or len(found) == MOST_NODES:
                return None
            found.add(node)
            for item in inputs_of(node):
                if item.op == "get_attr" or self._is_there(item):
                    continue
                if compromise and _widens(node) and owner(item).op == "call_function":
                    instead[item] = None
                else:
                    pending.append(whole(item))
        if compromise and not instead:
            return None
        return found, list(instead)

    def _is_there(self, node: fx.Node) -> bool:
        return is_lasting(node) or owner(node) in self._anyway

    def _described(self, kind: PlanKind, nodes: set[fx.Node], saved: list[Kept], instead: list[fx.Node]) -> Place:
        ordered = sorted(nodes, key=self._place.__getitem__)
        named = [n for n in ordered if n in self._hidden or any(u in self._hidden and u in nodes for u in n.users)]
        operators = frozenset(node for node in nodes if not is_view(node))
        cost = sum(map(milliseconds, operators))
        cluster = cluster_of(named) or cluster_of(ordered) or "Identity+"
        return Place(cluster, kind, operators, tuple(saved), tuple(Kept(owner(item)) for item in instead), cost)


def _widens(node: fx.Node) -> bool:
    """Whether a node is a cast from a smaller type."""
    if packet(node) is not aten._to_copy:
        return False
    source = node.all_input_nodes[0].meta["val"]
    return bool(source.dtype.itemsize < node.meta["val"].dtype.itemsize)


def _depends_on_numbers(joint: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on parameters or on inputs of floating point: not masks, positions and the like."""
    found: set[fx.Node] = set()
    for node in joint.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                found.add(node)
        elif any(item in found for item in node.all_input_nodes):
            found.add(node)
    return found


@dataclass(frozen=True)
class Wish:
    """An option with the plan that a user gave for it."""

    option: Option
    requested: int

    @property
    def places(self) -> Sequence[Place]:
        """The places that the plan is for: the first so many in the order of the graph."""
        return self.option.places if self.requested == -1 else self.option.places[: self.requested]


def matched(plans: Iterable[Plan], options: Sequence[Option]) -> list[Wish]:
    """The options that plans speak of; a plan that speaks of nothing in the graph is an error."""
    known = {(option.cluster, option.kind): option for option in options}
    wishes: list[Wish] = []
    for plan in plans:
        if plan.kind == PlanKind.OFF:
            found = [option for option in options if option.cluster == plan.cluster]
            if not found:
                raise _unknown(plan, options)
            continue
        option = known.get((plan.cluster, plan.kind))
        if option is None:
            raise _unknown(plan, options)
        if plan.count > len(option.places):
            raise OrtAccelError(
                f"memory.plans: {plan} asks for {plan.count} places, and the model has {len(option.places)}; "
                f"write {plan.cluster}:{plan.kind}:{len(option.places)}, or -1 for all"
            )
        wishes.append(Wish(option, plan.count))
    return wishes


def _unknown(plan: Plan, options: Sequence[Option]) -> OrtAccelError:
    other = next((option for option in options if option.cluster == plan.cluster), None)
    if other is not None:
        return OrtAccelError(f"memory.plans: {plan}: this cluster can be of type {other.kind} only, not {plan.kind}")
    names = list(dict.fromkeys(option.cluster for option in options))
    near = get_close_matches(plan.cluster, names, n=_SHOWN, cutoff=0.0)
    listed = [*near, *(name for name in names if name not in near)]
    shown = ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")
    return OrtAccelError(
        f"memory.plans: {plan}: the model has no cluster {plan.cluster} within reach of memory.probe; "
        + (f"there are, nearest first: {shown}" if names else "nothing in it can be computed again")
    )
