"""Replaces bitsandbytes' products with 4-bit weights by our operator (`kernels/linear_4bit.py`).

bitsandbytes calls the product by itself, and no function with a gradient, where the input needs no gradient.
"""

from __future__ import annotations

import torch
from torch import fx

from ort_accel.kernels.linear_4bit import linear_4bit
from ort_accel.passes.common import recompile
from ort_accel.passes.options import PassOptions

PRODUCT = "bitsandbytes.gemm_4bit.default"


def replace_4bit_products(graph: fx.Graph, _: PassOptions) -> int:
    """Replace each product; returns how many."""
    found = [node for node in graph.nodes if node.op == "call_function" and str(node.target) == PRODUCT]
    for node in found:
        assert isinstance(node.target, torch._ops.OpOverload)
        names = [argument.name for argument in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        with graph.inserting_before(node):
            product = graph.call_function(linear_4bit, (*map(given.get, names), torch.float32))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
    if found:
        recompile(graph)
    return len(found)
