"""A segment that PyTorch runs: the same ATen calls as in eager mode."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import count, islice
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ort_accel.executor.reuse_operands import dying_operands, write_over
from ort_accel.graph.nodes import depends_on_data, is_size
from ort_accel.graph.symbolic_sizes import SizeFunction, expression, hinted_bytes
from ort_accel.kernels import index_add
from ort_accel.kernels.embedding_backward import embedding_gradient
from ort_accel.kernels.output_buffers import LARGE, is_for_pool, is_placed, placed
from ort_accel.kernels.tensor_asserts import check
from ort_accel.partition.segments import Body
from ort_accel.passes.fuse_cross_entropy import JOINED, pooled_cross_entropy_gradient

aten = torch.ops.aten

OTHERWISE: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten._assert_async.msg: check,
    aten._assert_scalar.default: check,
    aten.index_put.default: index_add.index_put,
    aten._unsafe_index_put.default: index_add.index_put,
}
"""What is called in place of an operator. Tensors from ONNX Runtime are contiguous where eager's may not be, so that a
plain view can be impossible; and sums at listed rows are faster so."""

POOLED: dict[Any, Any] = {
    aten.embedding_dense_backward.default: embedding_gradient,
    JOINED: pooled_cross_entropy_gradient,
}
"""What has a way of its own to have its results in the memory of ONNX Runtime's pool."""


class PyTorchSegment:
    """Runs nodes, together with the views they need, through code that torch.fx generates."""

    def __init__(
        self,
        body: Body,
        wanted: Sequence[fx.Node],
        owner: fx.GraphModule,
        pooled: bool = False,
        spent: Collection[fx.Node] | None = None,
        better: Mapping[fx.Node, Any] = MappingProxyType({}),
    ) -> None:
        """`pooled` says that large results may be in ONNX Runtime's memory; others are placed where PyTorch would leave
        gaps. `better` has what to call in place of a node's operator. With `spent`, the inputs whose memory nobody
        needs any more, results are written over those and over what was made here, where nothing else reads it."""
        self.inputs = [node for node in body.inputs if not is_size(node)]
        sizes = [node for node in body.inputs if is_size(node)]
        replaced = {} if spent is None else dying_operands(body.nodes, wanted, spent)
        taken = replaced.keys() | better.keys()
        places = [node for node in body.nodes if node not in taken and _is_placed(node, pooled)]
        results = [size for node in places for size in node.meta["val"].shape]
        self._size_values = SizeFunction(map(expression, [*(node.meta["val"] for node in sizes), *results]))
        replacements = OTHERWISE | POOLED if pooled else OTHERWISE
        graph = fx.Graph()
        given = graph.placeholder("given")
        takes = (graph.call_function(operator.getitem, (given, position)) for position in count())
        copies = dict(zip([*self.inputs, *sizes], takes, strict=False))
        shapes = {node: tuple(islice(takes, node.meta["val"].ndim)) for node in places}
        graph.call_method("clear", (given,))
        for node in body.nodes:
            copy = graph.node_copy(node, copies.__getitem__)
            copy.target = better.get(node) or replacements.get(copy.target, copy.target)
            if node in replaced:
                write_over(copy, copies[replaced[node]])
            elif node in shapes:
                copy.target = placed(node.target, pooled)
                copy.args = (node.meta["val"].dtype, shapes[node], *copy.args)
            copies[node] = copy
        graph.output([copies[node] for node in wanted])
        self._module = fx.GraphModule(owner, graph)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"inputs": []}

    def __call__(self, tensors: list[Any], symbols: dict[str, int]) -> Sequence[Any]:
        """Run with these inputs. The list is emptied, so that a tensor's memory is free after its last use."""
        given = [*tensors, *self._size_values(symbols)]
        tensors.clear()
        results: Sequence[Any] = self._module(given)
        return results


def lies_in_pool(node: fx.Node) -> bool:
    """Whether the result of a node that PyTorch runs lies in ONNX Runtime's pool, where large ones may."""
    if node.target not in POOLED:
        return is_for_pool(node) and not depends_on_data(node)
    value = node.meta["val"]
    return value.device.type == "cpu" and value.dtype == torch.float32 and hinted_bytes(value) >= LARGE


def _is_placed(node: fx.Node, pooled: bool) -> bool:
    """Whether the result of a node is to be placed, and its sizes are known before anything has run."""
    return is_placed(node, pooled) and not depends_on_data(node)
