"""Divides a graph that is not tuned so that it costs least by the speed of this machine's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ort_accel.autotune.min_cut import Costs, cheapest
from ort_accel.autotune.throughput import KernelTimes, Machine, amount_of, is_timed
from ort_accel.autotune.time_matmuls import TimedMatmuls
from ort_accel.graph.nodes import fakes_in
from ort_accel.lowering.onnx_graph import HALF_DTYPES
from ort_accel.operators.flops import flops
from ort_accel.operators.powers import is_long_power
from ort_accel.partition.assign import Assignment, Refusal
from ort_accel.partition.known_slow_ops import MIN_HANDOVER_ELEMENTS
from ort_accel.partition.segments import readers_of
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.segments import Runner

EQUAL_SHARE = 0.1
"""Times that differ by a smaller share count as equal: a busy machine is wrong by about as much."""

MIN_SHARE_SAVED = 0.05
"""The share of a graph's estimated time that has to be saved for anything to move."""

ORT_MATMUL_PENALTY = 0.1
"""The share by which ONNX Runtime's products take longer between PyTorch's kernels than one after the other."""

LARGE_MATMUL_FLOPS = 1 << 25
"""Operations of a product from which on the better kernel saves about what a handover costs."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Estimator:
    """Lets PyTorch run the nodes that it runs so much faster here that handing tensors over pays."""

    machine: Machine
    products: TimedMatmuls | None = None
    """Times of large products at their own sizes."""
    in_one_session: bool = False
    """Sessions call PyTorch's kernels, so that no tensor is handed over."""

    def estimates(self, node: fx.Node) -> bool:
        """True if calls of a node's operator are timed on this machine."""
        return is_timed(node.target) and _is_like_timed(node)

    def decide(self, assignment: Assignment) -> Mapping[fx.Node, Refusal]:
        """Gives PyTorch the nodes of the cheapest division; none unless that division saves enough."""
        large = [node for node in assignment.undecided if _is_large(node)]
        times = {node: found for node in large if (found := self._times(node))}
        if not any(map(_is_pytorch_faster, times.values())) and not any(map(_is_half, large)):
            return {}
        if (price := 0.0 if self.in_one_session else self.machine.price) is None:
            return {}
        costs = self._costs(assignment, large, times)
        readers = readers_of(costs, assignment.free)
        in_pytorch = {node for node, runner in assignment.runner.items() if runner is Runner.PYTORCH}
        if self.in_one_session:  # each node stands for itself, and a tie is ONNX Runtime's
            division = {node for node in large if _is_cheaper_called(node, costs[node], times.get(node))}
        else:
            division = cheapest(costs, readers, price) - in_pytorch
        before, after = (_total(costs, readers, nodes, price) for nodes in (in_pytorch, in_pytorch | division))
        if before - after < MIN_SHARE_SAVED * before:
            return {}
        return {node: _refusal(node, times.get(node)) for node in division}

    def _times(self, node: fx.Node) -> KernelTimes | None:
        if not _is_like_timed(node):
            return None
        if self.products is not None and (times := self.products.kernel_times(node)):
            return times
        times = self.machine.kernel_times(node.target)
        return times.scaled_to(node) if times else None

    def _costs(
        self, assignment: Assignment, large: Iterable[fx.Node], times: Mapping[fx.Node, KernelTimes]
    ) -> Mapping[fx.Node, Costs]:
        """Returns what each node costs on either side."""
        nodes = [(node, runner) for node, runner in assignment.runner.items() if node not in assignment.free]
        costs = {node: Costs(0.0, 0.0) if runner is Runner.ORT else Costs(math.inf, 0.0) for node, runner in nodes}
        costs |= {node: Costs(0.0, self._cost_of_untimed(node)) for node in large}
        return costs | {node: _costs_of(node, found) for node, found in times.items()}

    def _cost_of_untimed(self, node: fx.Node) -> float:
        """Returns what a move must save if the node was not timed: the possible error of taking both times as equal.

        Nodes of 16-bit types need to save nothing: on the CPU, ONNX Runtime computes most of them between casts.
        """
        if _is_half(node):
            return 0.0
        like = self.machine.kernel_times(aten.mm.default if flops(node) else aten.add.Tensor)
        return EQUAL_SHARE * like.scaled_to(node).ort if like else 0.0


def _costs_of(node: fx.Node, times: KernelTimes) -> Costs:
    if _differ(times):
        return Costs(times.ort, times.pytorch)
    return Costs(times.ort * (1 + ORT_MATMUL_PENALTY if flops(node) else 1), times.ort)


def _is_cheaper_called(node: fx.Node, cost: Costs, times: KernelTimes | None) -> bool:
    """True for a node whose call of PyTorch's kernel is faster; untimed nodes of 16-bit types are expected to be."""
    return cost.pytorch < cost.ort or (times is None and _is_half(node))


def _is_pytorch_faster(times: KernelTimes) -> bool:
    return _differ(times) and times.pytorch < times.ort


def _differ(times: KernelTimes) -> bool:
    return abs(times.ort - times.pytorch) > EQUAL_SHARE * max(times.ort, times.pytorch)


def _is_like_timed(node: fx.Node) -> bool:
    """True if a node works as the timed calls do: in single precision, and with no other power than a square."""
    tensors = fakes_in(node.meta["val"])
    return bool(tensors) and tensors[0].dtype == torch.float32 and not is_long_power(node)


def _is_half(node: fx.Node) -> bool:
    """True if a node reads or makes 16-bit numbers."""
    values = [node.meta["val"], *(argument.meta.get("val") for argument in node.all_input_nodes)]
    return any(tensor.dtype in HALF_DTYPES for value in values for tensor in fakes_in(value))


def _is_large(node: fx.Node) -> bool:
    least = LARGE_MATMUL_FLOPS if flops(node) else MIN_HANDOVER_ELEMENTS
    return bool(fakes_in(node.meta["val"])) and amount_of(node) >= least


def _total(
    costs: Mapping[fx.Node, Costs], readers: Mapping[fx.Node, set[fx.Node]], pytorch: set[fx.Node], price: float
) -> float:
    """Returns what a graph costs when PyTorch runs these nodes."""
    running = sum(cost.pytorch if node in pytorch else cost.ort for node, cost in costs.items())
    handed = sum(any((other in pytorch) != (node in pytorch) for other in others) for node, others in readers.items())
    return running + price * handed


def _refusal(node: fx.Node, times: KernelTimes | None) -> Refusal:
    if times is not None and not _differ(times) and flops(node):
        return Refusal(Reason.SLOWER, f"about {_ms(times.pytorch)} on either side, and in whole steps less in PyTorch")
    if times is None and _is_half(node):
        return Refusal(Reason.SLOWER_ELSEWHERE, "ONNX Runtime computes most operators of 16-bit types between casts")
    if times is None or not _is_pytorch_faster(times):
        return Refusal(Reason.NEIGHBOUR)
    return Refusal(Reason.SLOWER, f"about {_ms(times.pytorch)} in PyTorch, {_ms(times.ort)} in ONNX Runtime")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"
