"""Finds clusters of a segment's operators, and describes each so that a kernel can be generated for it.

A cluster is a connected part of the graph, of operators that a generated kernel computes in one pass over memory:
element-wise operators, reductions, norms, softmax and copies. Matrix products, random numbers and operators with a
kernel of the native library lie between clusters. No path leaves a cluster and enters it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ort_accel.generated.description import NotDescribable, Part
from ort_accel.graph.meta_keys import RUNS_AFTER
from ort_accel.graph.nodes import fakes_in, is_data_dependent, is_getitem, is_random, is_size, is_view, op_name, writes
from ort_accel.graph.symbolic_sizes import hinted_bytes
from ort_accel.kernels.kernel_call import Calls

aten = torch.ops.aten

REDUCTIONS = {
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten._softmax,
    aten._softmax_backward_data,
    aten.all,
    aten.amax,
    aten.amin,
    aten.any,
    aten.mean,
    aten.native_batch_norm_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.sum,
    aten.var,
    aten.var_mean,
}
COPIES = {
    aten._to_copy,
    aten.cat,
    aten.clone,
    aten.constant_pad_nd,
    aten.flip,
    aten.glu,
    aten.repeat,
    aten.roll,
    aten.select_backward,
    aten.select_scatter,
    aten.slice_backward,
    aten.slice_scatter,
    aten.stack,
    aten.tril,
    aten.triu,
}
CREATIONS = {aten.arange, aten.full, aten.full_like, aten.ones, aten.scalar_tensor, aten.zeros, aten.zeros_like}
"""Operators that read no memory. Each cluster that needs their results computes them itself."""

TYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8}

SIMPLE_KERNELS = {"add"}
"""Kernels of the native library that do no more than one element-wise operator does."""

MIN_NODES = 2
LEAST_SAVED_BYTES = 1 << 19
"""The traffic to memory that a cluster must save, at the sizes of the capture."""
MAX_NODES = 4000
"""A larger cluster takes too long to compile."""


@dataclass
class Cluster(Part):
    """Operators that one generated kernel computes."""

    saved_bytes: int = 0


def is_free(node: fx.Node) -> bool:
    """True for views, parts of results and constant tensors, which every reader makes for itself.

    `as_strided` names positions in memory, which differ where a reader has the tensor in other memory.
    """
    if is_getitem(node) or is_size(node):
        return True
    is_creation = getattr(node.target, "overloadpacket", None) in CREATIONS
    return is_creation or (is_view(node) and node.target is not aten.as_strided.default)


def find_clusters(
    nodes: Sequence[fx.Node],
    wanted: Collection[fx.Node],
    called: Calls,
    operators: Collection[str] | None = None,
    least_saved_bytes: int = LEAST_SAVED_BYTES,
) -> list[Cluster]:
    """Returns the clusters of a segment that save so much memory traffic, described.

    They contain only these operators, such as `aten.mul.Tensor`, if some are given.
    """
    found: list[Cluster] = []
    readers = _readers(nodes, wanted, called)
    for members in _components(nodes, called, operators):
        if MIN_NODES <= len(members) <= MAX_NODES:
            cluster = _cluster(members, readers)
            if cluster.saved_bytes < least_saved_bytes or not cluster.outputs:
                continue
            try:
                cluster.describe()
            except NotDescribable:
                continue
            found.append(cluster)
    return found


def _is_eligible(node: fx.Node, called: Calls) -> bool:
    if node.op != "call_function" or is_free(node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    packet = node.target.overloadpacket
    is_known = torch.Tag.pointwise in node.target.tags or packet in REDUCTIONS or packet in COPIES
    if not is_known or is_random(node) or writes(node) or is_data_dependent(node):
        return False
    kernel = called.get(node)
    if kernel is not None and kernel.name not in SIMPLE_KERNELS:
        return False
    tensors = fakes_in([item.meta.get("val") for item in node.all_input_nodes]) + fakes_in(node.meta.get("val"))
    return all(each.dtype in TYPES and each.device.type == "cpu" for each in tensors)


def nodes_read(node: fx.Node, called: Calls) -> list[fx.Node]:
    """Returns the nodes that a node reads, and those that the kernel reads which computes it."""
    kernel = called.get(node)
    arguments = () if kernel is None else kernel.arguments
    return [*node.all_input_nodes, *(item for item in arguments if isinstance(item, fx.Node))]


def _sources_of(node: fx.Node, called: Calls) -> Iterator[fx.Node]:
    """Yields the nodes whose results a node reads, also through what is free."""
    pending = nodes_read(node, called)
    while pending:
        source = pending.pop()
        if is_free(source):
            pending += source.all_input_nodes
        else:
            yield source


def _components(nodes: Sequence[fx.Node], called: Calls, operators: Collection[str] | None) -> list[list[fx.Node]]:
    """Returns the connected groups of eligible nodes with equal depth.

    The depth grows on the way through a node that is not eligible, so that no path re-enters a group.
    """
    named = {node.name: node for node in nodes}
    depth: dict[fx.Node, int] = {}
    root: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            root[node] = node = root[root[node]]
        return node

    for node in nodes:
        if is_free(node) or node.op != "call_function":
            continue
        is_member = _is_eligible(node, called) and (operators is None or op_name(node) in operators)
        sources = [source for source in _sources_of(node, called) if source in depth]
        depths = [depth[source] + (source in root and not is_member) for source in sources]
        waits = [named[name] for name in node.meta.get(RUNS_AFTER, ()) if name in named]
        depth[node] = max([*depths, *(depth[other] + 1 for other in waits if other in depth)], default=0)
        if is_member:
            root[node] = node
            for source in sources:
                if source in root and depth[source] == depth[node]:
                    root[find(source)] = find(node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in root:
        groups.setdefault(find(node), []).append(node)
    return list(groups.values())


def _readers(
    nodes: Sequence[fx.Node], wanted: Collection[fx.Node], called: Calls
) -> Mapping[fx.Node, Collection[fx.Node | None]]:
    """Returns the operators that read each result, also through what is free; None where the segment returns it."""
    found: dict[fx.Node, list[fx.Node | None]] = defaultdict(list)
    for node in nodes:
        if node.op == "call_function" and not is_free(node):
            for value in nodes_read(node, called):
                for result in _results_behind(value):
                    found[result].append(node)
    for value in wanted:
        for result in _results_behind(value):
            found[result].append(None)
    return found


def _cluster(members: list[fx.Node], readers: Mapping[fx.Node, Collection[fx.Node | None]]) -> Cluster:
    own = set(members)
    inputs = dict.fromkeys(value for node in members for value in _values_read(node, own))
    results = [value for node in members for value in (node, *sorted(filter(is_getitem, node.users)))]
    outputs = [value for value in results if any(reader not in own for reader in readers.get(value, ()))]
    written = sum(_bytes(node) for node in members)
    loaded = sum(_bytes(source) for node in members for source in _sources_of(node, {}))
    kept = sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))
    return Cluster(members, list(inputs), outputs, saved_bytes=written + loaded - kept)


def _bytes(node: fx.Node) -> int:
    return sum(map(hinted_bytes, fakes_in(node.meta.get("val"))))


def producer_of(value: fx.Node) -> fx.Node:
    """Returns the node that a value is the result of, or one of several results."""
    return value.args[0] if is_getitem(value) else value  # type: ignore[return-value]


def _values_read(node: fx.Node, own: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yields the tensors from outside that a cluster needs for one of its nodes."""
    pending = list(node.all_input_nodes)
    while pending:
        value = pending.pop(0)
        if producer_of(value) in own or is_size(value):
            continue
        if is_free(value) and not is_getitem(value):
            pending += value.all_input_nodes
        elif is_getitem(value) and is_view(value.args[0]):  # type: ignore[arg-type]
            pending += value.args[0].all_input_nodes  # type: ignore[union-attr]
        else:
            yield value


def _results_behind(value: fx.Node) -> Iterator[fx.Node]:
    """Yields the results of operators that a value is a view or a part of."""
    pending = [value]
    while pending:
        value = pending.pop()
        if is_free(producer_of(value)):
            pending += value.all_input_nodes
        else:
            yield value
