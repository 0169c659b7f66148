"""What a step's memory is for, segment by segment."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ort_accel.memory_records import MemoryStage
from ort_accel.recompute.peak_memory import Stage, Timeline

LASTING, STATES, GRADIENTS = "parameters, buffers, inputs", "optimizer states", "gradients"
KEPT, TEMPORARY, UNUSED = "kept for the backward", "temporaries", "unused in ONNX Runtime's pool"


def account(step: Timeline, places: Mapping[fx.Node, int], layers: int) -> list[MemoryStage]:
    """The stages of a step; `places` tells the layer of each operator of the forward, of so many layers."""
    layer = {node.name: place for node, place in places.items()}
    value = {name: name for name in step.stash} | step.stands_for
    alive = {name for stage in step.stages for name in stage.live if value.get(name) in layer}
    place = {name: layer[value[name]] for name in alive}
    parts = {name: f"{KEPT}: {_part(place[name], layers)}" for name in sorted(alive, key=place.__getitem__)}
    names = [LASTING, STATES, GRADIENTS, *dict.fromkeys(parts.values()), TEMPORARY, UNUSED]
    return [MemoryStage(stage.phase, _amounts(stage, step, parts, names)) for stage in step.stages]


def _part(place: int, layers: int) -> str:
    return "before the layers" if place == 0 else "behind the layers" if place > layers else f"layer {place}"


def _amounts(stage: Stage, step: Timeline, kept: Mapping[str, str], names: list[str]) -> dict[str, int]:
    """Bytes by what they are for."""
    found = dict.fromkeys(names, 0) | {LASTING: step.lasting, STATES: step.states}
    found[UNUSED] = stage.held - stage.in_ort
    for name, size in stage.live.items():
        found[GRADIENTS if name in step.gradients else kept.get(name, TEMPORARY)] += size
    return found
