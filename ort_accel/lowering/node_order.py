"""The order in which ONNX Runtime runs a model, which is not that of the model's operators.

It goes back from the results: the last of them comes first, and of what an operator reads, what stands last in the
model is computed first. So a sum to which one product after the other is added would have all its products computed
before the first is added, and all of them in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir


def listed(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """The operators of a model so listed that ONNX Runtime runs them, as far as may be, in the order given."""
    place = {node: index for index, node in enumerate(nodes)}
    found: dict[ir.Node, None] = {}
    met: set[ir.Node] = set()
    for root in reversed(nodes):
        pending = [(root, False)]
        while pending:
            node, is_behind = pending.pop()
            if is_behind:
                found[node] = None
            elif node not in met:
                met.add(node)
                makers = {maker for value in _read(node) if (maker := value.producer()) in place}
                pending.append((node, True))
                pending += [(maker, False) for maker in sorted(makers, key=place.__getitem__)]
    return list(found)


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """What an operator reads, also within graphs of its own."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _read(inner)
