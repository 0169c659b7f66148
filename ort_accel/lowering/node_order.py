"""The order of a model's operators, so that ONNX Runtime runs them in the order of the graph.

ONNX Runtime visits a model from its last result backwards, and of an operator's inputs the last one first. In the order
of the graph, it would compute all products of a sum of products before it adds the first two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir


def in_running_order(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return operators in an order in which ONNX Runtime runs them, as far as possible, in the given one."""
    position = {node: index for index, node in enumerate(nodes)}
    ordered: dict[ir.Node, None] = {}
    visited: set[ir.Node] = set()
    for root in reversed(nodes):
        pending = [(root, False)]
        while pending:
            node, inputs_done = pending.pop()
            if inputs_done:
                ordered[node] = None
            elif node not in visited:
                visited.add(node)
                makers = {maker for value in _read(node) if (maker := value.producer()) in position}
                pending.append((node, True))
                pending += [(maker, False) for maker in sorted(makers, key=position.__getitem__)]
    return list(ordered)


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the inputs of an operator and of its subgraphs."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _read(inner)
