"""What is computed again unasked: keeping it costs memory, and computing it again next to nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ort_accel.graph.nodes import fakes_in
from ort_accel.memory_records import PlanKind
from ort_accel.recompute.joint_graph import is_lasting
from ort_accel.recompute.onnx_names import packet
from ort_accel.recompute.plans import Option, Place

aten = torch.ops.aten

LIGHT = {
    aten.gelu,
    aten.silu,
    aten.sigmoid,
    aten.mul,
    aten.add,
    aten.sub,
    aten.rsub,
    aten.neg,
    aten.div,
    aten.native_layer_norm,
    aten._fused_rms_norm,
    aten.native_dropout_backward,  # a value times its mask
    aten._to_copy,
    aten.clone,
}
"""Norms, activations and arithmetic. All are smooth, so it does no harm if another kernel rounds the second result
otherwise: a comparison, an index or a rounded number could come out as another one."""

WORTH = 4e6
"""Bytes that have to be saved for a millisecond of the cost model. Six layers of a BERT of width 384 (8 x 128 tokens)
then keep 80 MiB instead of 127, and a Llama 179 instead of 290, for 0 to 1 % of a step's time."""


def light_places(options: Iterable[Option]) -> list[Place]:
    """The places of which each operator is light and whose values are worth it. On the CPU alone: the other devices
    multiply so fast that this, too, would be seen in a step's time."""
    recomputed = (option for option in options if option.kind == PlanKind.RECOMPUTE)
    return [place for option in recomputed for place in option.places if _is_worth(place) and _is_light(place)]


def _is_worth(place: Place) -> bool:
    return place.hint >= WORTH * place.cost


def _is_light(place: Place) -> bool:
    return all(packet(node) in LIGHT and _is_on_cpu(node) and not _casts_a_weight(node) for node in place.nodes)


def _is_on_cpu(node: fx.Node) -> bool:
    return all(fake.device.type == "cpu" for fake in fakes_in(node.meta["val"]))


def _casts_a_weight(node: fx.Node) -> bool:
    return packet(node) is aten._to_copy and is_lasting(node.all_input_nodes[0])
