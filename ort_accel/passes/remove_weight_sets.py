"""Removes assignments of a weight's memory to itself, which bitsandbytes' 8-bit layers make in every forward.

A layer assigns its integers to `weight.data`, where they are already. A graph that sets the memory of an input counts
as one that changes its inputs, and computes all rows.
"""

from __future__ import annotations

from torch import Tensor, fx

from ort_accel.passes.common import example_of, recompile
from ort_accel.passes.options import PassOptions

ASSIGNMENTS = {str(Tensor.set_), "aten.shallow_copy_data_"}
"""The targets that Dynamo captures `weight.data = source` as; the second one from torch 2.14 on."""
WEIGHT = "Int8Params"
"""The class of such weights. The layer multiplies with the integers, whatever memory this parameter has."""


def remove_weight_sets(graph: fx.Graph, _: PassOptions) -> int:
    """Remove such assignments from a graph that Dynamo captured; returns how many."""
    assignments = [node for node in graph.nodes if node.op == "call_function" and str(node.target) in ASSIGNMENTS]
    found = [node for node in assignments if _is_in_place_already(*node.args)]
    for node in found:
        for each in (*node.users, node):  # Dynamo takes the count of the weight's changes back
            graph.erase_node(each)
    if found:
        recompile(graph)
    return len(found)


def _is_in_place_already(weight: fx.Node, source: fx.Node, *more: object) -> bool:
    """True if both are inputs with the same memory. Fake tensors share their storage where real ones do."""
    if more or weight.op != "placeholder" or source.op != "placeholder":
        return False
    input_of = weight.meta.get("grapharg")
    if input_of is None or type(input_of.example).__name__ != WEIGHT:
        return False
    return _memory(example_of(weight)) == _memory(example_of(source))


def _memory(tensor: Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
