"""Runs a segment in PyTorch: the same ATen calls as in eager mode."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from itertools import count, islice

import torch
from torch import fx
from torch.fx.node import Target

from ort_accel.executor.program import Inputs, Outputs, Symbols
from ort_accel.executor.reuse_operands import reusable_operands, write_over
from ort_accel.graph.nodes import is_data_dependent, is_size
from ort_accel.graph.symbolic_sizes import SizeFunction, expression
from ort_accel.kernels import index_add
from ort_accel.kernels.output_buffers import needs_buffer, with_buffer
from ort_accel.kernels.tensor_asserts import raise_unless
from ort_accel.partition.segments import Body

aten = torch.ops.aten

REPLACEMENTS: dict[Target, Target] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten._assert_async.msg: raise_unless,
    aten._assert_scalar.default: raise_unless,
    aten.index_put.default: index_add.index_put,
    aten._unsafe_index_put.default: index_add.index_put,
}
"""Functions that are called in place of operators.

Tensors from ONNX Runtime are contiguous where eager's may not be, so a plain view can be impossible.
"""


class PyTorchSegment:
    """Runs nodes, with the views that they need, through code that torch.fx generates."""

    def __init__(
        self,
        body: Body,
        wanted: Sequence[fx.Node],
        owner: fx.GraphModule,
        dead_inputs: Collection[fx.Node] | None = None,
    ) -> None:
        """Generates the code of the segment.

        Results are written over `dead_inputs`, whose memory nobody needs afterwards, and over dead values of the
        segment; with None, over nothing.
        """
        self.inputs = [node for node in body.inputs if not is_size(node)]
        sizes = [node for node in body.inputs if is_size(node)]
        replaced = {} if dead_inputs is None else reusable_operands(body.nodes, wanted, dead_inputs)
        buffered = [node for node in body.nodes if node not in replaced and _has_output_buffer(node)]
        buffer_sizes = [size for node in buffered for size in node.meta["val"].shape]
        self._size_values = SizeFunction(map(expression, [*(node.meta["val"] for node in sizes), *buffer_sizes]))
        graph = fx.Graph()
        given = graph.placeholder("given")
        takes = (graph.call_function(operator.getitem, (given, position)) for position in count())
        copies = dict(zip([*self.inputs, *sizes], takes, strict=False))
        shapes = {node: tuple(islice(takes, node.meta["val"].ndim)) for node in buffered}
        graph.call_method("clear", (given,))
        for node in body.nodes:
            copy = graph.node_copy(node, copies.__getitem__)
            copy.target = REPLACEMENTS.get(copy.target, copy.target)
            if node in replaced:
                write_over(copy, copies[replaced[node]])
            elif node in shapes:
                copy.target = with_buffer(node.target)
                copy.args = (node.meta["val"].dtype, shapes[node], *copy.args)
            copies[node] = copy
        graph.output([copies[node] for node in wanted])
        self._module = fx.GraphModule(owner, graph)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"inputs": []}

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs with these inputs, and empties their list so that a tensor's memory is free after its last use."""
        given = [*tensors, *self._size_values(symbols)]
        tensors.clear()
        results: Outputs = self._module(given)
        return results


def _has_output_buffer(node: fx.Node) -> bool:
    """True if a node writes into a given buffer, and the buffer's sizes are known before anything has run."""
    return needs_buffer(node) and not is_data_dependent(node)
