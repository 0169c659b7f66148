"""Replaces clusters in a segment by calls of their kernels: a copy of the segment, which is left as it is."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TypeAlias

from torch import fx

from ort_accel.generated.clusters import Cluster, is_free, nodes_read, producer_of
from ort_accel.graph.meta_keys import RUNS_AFTER
from ort_accel.graph.nodes import is_getitem, is_random, is_size
from ort_accel.kernels.kernel_call import Calls, KernelArgument, KernelCall, Output, Stride
from ort_accel.partition.segments import Body

Unit: TypeAlias = fx.Node | Cluster
"""A node, or a cluster that becomes one call."""


@dataclass(frozen=True)
class SegmentGraph:
    """The nodes of a segment, the results wanted of it, and the nodes that are calls."""

    body: Body
    wanted: Sequence[fx.Node]
    called: Calls


def generated_kernel(*_: object) -> None:
    """The target of nodes that stand for a cluster, which only a session runs."""
    raise AssertionError("a generated kernel runs in a session")


def replace_clusters(segment: SegmentGraph, clusters: Mapping[str, Sequence[Cluster]]) -> SegmentGraph:
    """Returns a copy of a segment in which clusters are calls of kernels, which `clusters` has by name."""
    return _Replacement(segment, clusters).segment()


class _Replacement:
    def __init__(self, segment: SegmentGraph, clusters: Mapping[str, Sequence[Cluster]]) -> None:
        self._old = segment
        self._kernel = {id(cluster): name for name, equal in clusters.items() for cluster in equal}
        self._cluster_of = {node: each for equal in clusters.values() for each in equal for node in each.nodes}
        self._by_name = {node.name: node for node in segment.body.nodes}
        owner = next((node.graph.owning_module for node in segment.body.nodes), None)
        self._graph = fx.Graph(owning_module=owner)
        self._new: dict[fx.Node, fx.Node] = {}
        self._called: dict[fx.Node, KernelCall | None] = {}

    def segment(self) -> SegmentGraph:
        """Returns the copy."""
        body = self._old.body
        for node in body.inputs:
            self._new[node] = placeholder = self._graph.placeholder(node.name)
            placeholder.meta = dict(node.meta)
        for unit in _in_order(self._units(), self._reads):
            if isinstance(unit, Cluster):
                self._write_cluster(unit)
            else:
                self._copy(unit)
        inputs = [self._new[node] for node in body.inputs]
        given = set(inputs)
        nodes = [node for node in self._graph.nodes if node not in given]
        return SegmentGraph(Body(inputs, nodes), [self._new[node] for node in self._old.wanted], self._called)

    def _units(self) -> list[Unit]:
        """Returns clusters and remaining nodes, a cluster where its last node is."""
        needed = self._free_nodes_needed()
        last = {id(cluster): node for node, cluster in self._cluster_of.items()}
        units: list[Unit] = []
        for node in self._old.body.nodes:
            cluster = self._cluster_of.get(node)
            if cluster is None:
                if not is_free(node) or node in needed or is_size(node):
                    units.append(node)
            elif last[id(cluster)] is node:
                units.append(cluster)
        return units

    def _free_nodes_needed(self) -> set[fx.Node]:
        """Returns the views, parts and constants that nodes outside of clusters read."""
        outside = [node for node in self._old.body.nodes if node not in self._cluster_of and not is_free(node)]
        pending = [*self._old.wanted, *(source for node in outside for source in nodes_read(node, self._old.called))]
        pending += [node for cluster in self._cluster_of.values() for node in cluster.inputs]
        needed: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if is_free(node) and node not in needed and not self._is_result(node):
                needed.add(node)
                pending += node.all_input_nodes
        return needed

    def _is_result(self, node: fx.Node) -> bool:
        """True for the parts of a cluster's node, which the cluster itself returns."""
        return is_getitem(node) and producer_of(node) in self._cluster_of

    def _reads(self, unit: Unit) -> Iterator[Unit]:
        """Yields what a unit waits for."""
        nodes = unit.nodes if isinstance(unit, Cluster) else [unit]
        sources = unit.inputs if isinstance(unit, Cluster) else nodes_read(unit, self._old.called)
        names = [name for node in nodes for name in node.meta.get(RUNS_AFTER, ()) if name in self._by_name]
        for source in [*sources, *map(self._by_name.__getitem__, names)]:
            producer = producer_of(source) if self._is_result(source) else source
            yield self._cluster_of.get(producer, producer)

    def _write_cluster(self, cluster: Cluster) -> None:
        arguments = tuple(self._new[node] for node in cluster.inputs)
        call = self._graph.call_function(generated_kernel, arguments)
        call.meta["val"] = tuple(node.meta["val"] for node in cluster.outputs)
        outputs = [Output(at) for at in range(len(cluster.outputs))]
        name = self._kernel[id(cluster)]
        self._called[call] = KernelCall(name, (*arguments, *outputs, *cluster.symbols), reads_any_layout=True)
        for at, node in enumerate(cluster.outputs):
            self._new[node] = part = self._graph.call_function(operator.getitem, (call, at))
            part.meta["val"] = node.meta["val"]

    def _copy(self, node: fx.Node) -> None:
        self._new[node] = copied = self._graph.node_copy(node, self._new.__getitem__)
        if node in self._old.called:
            kernel = self._old.called[node]
            self._called[copied] = kernel and replace(kernel, arguments=tuple(map(self._argument, kernel.arguments)))

    def _argument(self, argument: KernelArgument) -> KernelArgument:
        match argument:
            case fx.Node():
                return self._new[argument]
            case Stride():
                return Stride(self._new[argument.node], argument.dim)
        return argument


def _in_order(units: Sequence[Unit], reads: Callable[[Unit], Iterable[Unit]]) -> Iterator[Unit]:
    """Yields units as early in their order as what they read allows. Random numbers are drawn in the same order."""
    position = {id(unit): at for at, unit in enumerate(units)}
    readers: dict[int, list[int]] = {}
    waiting: list[int] = []
    last_draw: int | None = None
    for at, unit in enumerate(units):
        before = {position[id(source)] for source in reads(unit) if id(source) in position} - {at}
        if isinstance(unit, fx.Node) and is_random(unit):
            before |= set() if last_draw is None else {last_draw}
            last_draw = at
        waiting.append(len(before))
        for source in before:
            readers.setdefault(source, []).append(at)
    ready = [at for at, count in enumerate(waiting) if count == 0]
    done = 0
    while ready:
        at = heappop(ready)
        done += 1
        yield units[at]
        for reader in readers.get(at, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heappush(ready, reader)
    assert done == len(units), "clusters wait for each other"
