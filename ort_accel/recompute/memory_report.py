"""Turns the decisions of the planner into the records of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sympy
from torch import fx

from ort_accel.recompute.joint_graph import producer
from ort_accel.recompute.offload import OffloadCandidates, Offloaded
from ort_accel.recompute.onnx_names import cluster_name
from ort_accel.recompute.peak_memory import StageMemory, StepMemory
from ort_accel.recompute.plans import PlanOption, PlanRequest, RecomputeSite
from ort_accel.recompute.saved_values import SavedValue, total_bytes
from ort_accel.reporting.memory import MemoryStage, PlanKind, PlanRow

INPUTS, STATES, GRADIENTS = "parameters, buffers, inputs", "optimizer states", "gradients"
SAVED, TEMPORARY = "kept for the backward", "temporaries"


def memory_stages(step: StepMemory, layer_of: Mapping[fx.Node, int], layers: int) -> list[MemoryStage]:
    """Returns the memory of each segment by purpose. `layer_of` gives the layer of each operator of the forward."""
    layer = {node.name: index for node, index in layer_of.items()}
    original = {name: name for name in step.saved} | step.original
    live = {name for stage in step.stages for name in stage.live if original.get(name) in layer}
    index = {name: layer[original[name]] for name in live}
    parts = {name: f"{SAVED}: {_layer_name(index[name], layers)}" for name in sorted(live, key=index.__getitem__)}
    purposes = [INPUTS, STATES, GRADIENTS, *dict.fromkeys(parts.values()), TEMPORARY]
    return [MemoryStage(stage.phase, _bytes_by_purpose(stage, step, parts, purposes)) for stage in step.stages]


def _layer_name(layer: int, layers: int) -> str:
    return "before the layers" if layer == 0 else "behind the layers" if layer > layers else f"layer {layer}"


def _bytes_by_purpose(
    stage: StageMemory, step: StepMemory, saved: Mapping[str, str], purposes: Iterable[str]
) -> dict[str, int]:
    found = dict.fromkeys(purposes, 0) | {INPUTS: step.input_bytes, STATES: step.state_bytes}
    for name, size in stage.live.items():
        found[GRADIENTS if name in step.gradients else saved.get(name, TEMPORARY)] += size
    return found


def plan_rows(
    options: Sequence[PlanOption], requests: Sequence[PlanRequest], applied: Iterable[RecomputeSite]
) -> list[PlanRow]:
    """Returns one row of the plan table for each cluster."""
    requested = {(request.option.cluster, request.option.kind): request.count for request in requests}
    identities = set(map(id, applied))
    return [
        PlanRow(
            option.cluster,
            option.kind,
            requested.get((option.cluster, option.kind), 0),
            sum(id(site) in identities for site in option.sites),
            len(option.sites),
            sum(site.saved_bytes for site in option.sites),
            str(sympy.expand(sum(site.symbolic_bytes for site in option.sites))),
            sum(site.cost_ms for site in option.sites),
            tuple(value.shape for value in option.sites[0].saved),
        )
        for option in options
    ]


def offload_rows(candidates: OffloadCandidates, offloaded: Offloaded) -> list[PlanRow]:
    """Returns one row of the plan table for each kind of operator whose results can be offloaded."""
    kinds: dict[str, list[SavedValue]] = {}
    for value in candidates.values.values():
        kinds.setdefault(cluster_name([producer(value.node)]) or "Identity+", []).append(value)
    return [
        PlanRow(
            cluster,
            PlanKind.OFFLOAD,
            0,
            sum(value.node.name in offloaded.values for value in values),
            len(values),
            total_bytes(values),
            str(sympy.expand(sum(value.symbolic_bytes for value in values))),
            candidates.cost_ms([value.node.name for value in values]),
            (values[0].shape,),
        )
        for cluster, values in kinds.items()
    ]


def symbol_values(joint: fx.Graph) -> dict[str, int]:
    """Returns the symbols of input sizes that can change, with their values at capture."""
    found: dict[str, int] = {}
    for node in joint.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in getattr(value, "shape", [value]):
            expr = getattr(getattr(size, "node", None), "expr", None)
            if isinstance(expr, sympy.Symbol) and size.node.has_hint():
                found[str(expr)] = int(size.node.hint)
    return found
