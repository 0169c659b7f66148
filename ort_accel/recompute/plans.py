"""Recompute plans: clusters of like operators whose results need not be saved, because the backward recomputes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import sympy
import torch
from torch import fx

from ort_accel.config.plan_text import Plan
from ort_accel.errors import OrtAccelError
from ort_accel.graph.nodes import is_view
from ort_accel.recompute.cost import node_ms
from ort_accel.recompute.joint_graph import (
    is_unchanged_input,
    packet,
    producer,
    storage_owner,
    tensor_inputs,
)
from ort_accel.recompute.onnx_names import cluster_name, may_recompute
from ort_accel.recompute.saved_values import SavedValue, saved_values, total_bytes
from ort_accel.recompute.transformer_layers import Layers
from ort_accel.reporting.memory import PlanKind

aten = torch.ops.aten

MOST_NODES = 50
"""A site of more nodes is no option."""

_MOST_SHOWN = 8


@dataclass(frozen=True)
class RecomputeSite:
    """One occurrence of a cluster in the graph."""

    cluster: str
    kind: PlanKind
    nodes: frozenset[fx.Node]
    """The operators that are recomputed."""
    saved: tuple[SavedValue, ...]
    """The values that need not be saved."""
    narrow_copies: tuple[SavedValue, ...] = ()
    """For a compromise: values of a smaller type, which are saved instead."""
    cost_ms: float = 0.0
    """Milliseconds of the recompute, by the cost model."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that it frees at the captured sizes."""
        return total_bytes(self.saved) - total_bytes(self.narrow_copies)

    @property
    def symbolic_bytes(self) -> int | sympy.Expr:
        """Bytes that it frees, as an expression if sizes can change."""
        copies = sum(item.symbolic_bytes for item in self.narrow_copies)
        return sum(item.symbolic_bytes for item in self.saved) - copies


@dataclass
class PlanOption:
    """All sites of one cluster in the order of the graph: one row of the plan table."""

    cluster: str
    kind: PlanKind
    sites: list[RecomputeSite] = field(default_factory=list)


@dataclass(frozen=True)
class Probe:
    """Extent of the search for plans."""

    advanced: bool
    within_layers: bool

    @classmethod
    def parse(cls, text: str) -> Probe:
        """Read `L:B`."""
        level, _, border = text.partition(":")
        return cls(level == "1", border == "1")


def find_plans(joint: fx.Graph, layers: Layers, probe: Probe) -> list[PlanOption]:
    """Returns the plan options of a joint graph; those that free most bytes come first."""
    options: dict[tuple[str, int], PlanOption] = {}
    for site in _SiteSearch(joint, layers, probe).sites():
        key = (site.cluster, site.kind)
        options.setdefault(key, PlanOption(*key)).sites.append(site)
    return sorted(options.values(), key=lambda option: -sum(site.saved_bytes for site in option.sites))


class _SiteSearch:
    """Searches upwards from every saved value for operators that can recompute it."""

    def __init__(self, joint: fx.Graph, layers: Layers, probe: Probe) -> None:
        self._advanced = probe.advanced
        saved = saved_values(joint)
        self._borders = layers.borders if probe.within_layers else set()
        self._available = {item.node for item in saved} | self._borders
        self._saved_of: dict[fx.Node, list[SavedValue]] = defaultdict(list)
        for item in saved:
            self._saved_of[producer(item.node)].append(item)
        self._position = {node: index for index, node in enumerate(joint.nodes)}
        self._on_floats = _float_dependent(joint)

    def sites(self) -> Iterable[RecomputeSite]:
        for operator, saved in self._saved_of.items():
            if any(item.node in self._borders for item in saved):
                continue
            found = self._search(operator, compromise=False)
            if found is not None:
                yield self._site(PlanKind.RECOMPUTE, found[0], saved, found[1])
                continue
            found = self._search(operator, compromise=True)
            if found is not None:
                site = self._site(PlanKind.COMPROMISE, found[0], saved, found[1])
                if site.saved_bytes > 0:
                    yield site

    def _search(self, operator: fx.Node, compromise: bool) -> tuple[set[fx.Node], list[fx.Node]] | None:
        """Returns the nodes between available values and an operator, and the values to save; None if too many."""
        found: set[fx.Node] = set()
        narrow: dict[fx.Node, None] = {}
        pending = [operator]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            if not may_recompute(node, self._advanced) or len(found) == MOST_NODES:
                return None
            found.add(node)
            for item in tensor_inputs(node):
                if item.op == "get_attr" or self._is_available(item):
                    continue
                if compromise and _widens(node) and storage_owner(item).op == "call_function":
                    narrow[item] = None
                else:
                    pending.append(producer(item))
        if compromise and not narrow:
            return None
        return found, list(narrow)

    def _is_available(self, node: fx.Node) -> bool:
        """True if the backward can read a value under every plan."""
        return is_unchanged_input(node) or storage_owner(node) in self._available

    def _site(
        self, kind: PlanKind, nodes: set[fx.Node], saved: list[SavedValue], narrow: list[fx.Node]
    ) -> RecomputeSite:
        ordered = sorted(nodes, key=self._position.__getitem__)
        named = [
            n for n in ordered if n in self._on_floats or any(u in self._on_floats and u in nodes for u in n.users)
        ]
        operators = frozenset(node for node in nodes if not is_view(node))
        cost_ms = sum(map(node_ms, operators))
        cluster = cluster_name(named) or cluster_name(ordered) or "Identity+"
        copies = tuple(SavedValue(storage_owner(item)) for item in narrow)
        return RecomputeSite(cluster, kind, operators, tuple(saved), copies, cost_ms)


def _widens(node: fx.Node) -> bool:
    """True for a cast from a smaller type."""
    if packet(node) is not aten._to_copy:
        return False
    source = node.all_input_nodes[0].meta["val"]
    return bool(source.dtype.itemsize < node.meta["val"].dtype.itemsize)


def _float_dependent(joint: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that depend on inputs of floating point. Masks and positions are not among them."""
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
class PlanRequest:
    """An option that a user has asked for, and at how many sites; -1 stands for all."""

    option: PlanOption
    count: int

    @property
    def sites(self) -> Sequence[RecomputeSite]:
        """The first sites in the order of the graph, as many as requested."""
        return self.option.sites if self.count == -1 else self.option.sites[: self.count]


def match_plans(plans: Iterable[Plan], options: Sequence[PlanOption]) -> list[PlanRequest]:
    """Returns the options that plans name. A plan that matches nothing in the graph is an error."""
    known = {(option.cluster, option.kind): option for option in options}
    requests: list[PlanRequest] = []
    for plan in plans:
        if plan.kind == PlanKind.OFF:
            if all(option.cluster != plan.cluster for option in options):
                raise _unknown(plan, options)
            continue
        option = known.get((plan.cluster, plan.kind))
        if option is None:
            raise _unknown(plan, options)
        if plan.count > len(option.sites):
            raise OrtAccelError(
                f"memory.plans: {plan} asks for {plan.count} places, and the model has {len(option.sites)}; "
                f"write {plan.cluster}:{plan.kind}:{len(option.sites)}, or -1 for all"
            )
        requests.append(PlanRequest(option, plan.count))
    return requests


def _unknown(plan: Plan, options: Sequence[PlanOption]) -> OrtAccelError:
    other = next((option for option in options if option.cluster == plan.cluster), None)
    if other is not None:
        return OrtAccelError(f"memory.plans: {plan}: this cluster can be of type {other.kind} only, not {plan.kind}")
    names = list(dict.fromkeys(option.cluster for option in options))
    near = get_close_matches(plan.cluster, names, n=_MOST_SHOWN, cutoff=0.0)
    listed = [*near, *(name for name in names if name not in near)]
    shown = ", ".join(listed[:_MOST_SHOWN])
    shown += f" and {len(listed) - _MOST_SHOWN} more" if len(listed) > _MOST_SHOWN else ""
    return OrtAccelError(
        f"memory.plans: {plan}: the model has no cluster {plan.cluster} within reach of memory.probe; "
        + (f"there are, nearest first: {shown}" if names else "nothing in it can be computed again")
    )
