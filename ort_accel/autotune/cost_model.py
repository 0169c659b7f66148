"""Who runs what where nothing is tuned: the division of a graph that costs least by the yardsticks of this machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from ort_accel.autotune.min_cut import Costs, cheapest
from ort_accel.autotune.throughput import Machine, Yardstick, amount_of, has_yardstick
from ort_accel.autotune.time_matmuls import Products
from ort_accel.graph.nodes import fakes_in
from ort_accel.lowering.onnx_graph import HALVES
from ort_accel.operators.flops import flops
from ort_accel.operators.powers import is_long_power
from ort_accel.partition.assign import Refusal
from ort_accel.partition.known_slow_ops import WORTH_A_CROSSING
from ort_accel.partition.segments import Assignment, readers_of
from ort_accel.reporting import Reason, Runner

ABOUT = 0.1
"""Times that differ by a smaller share are taken for equal: so much a busy machine gets wrong."""

LEAST_GAIN = 0.05
"""The share of a graph's estimated time that has to be saved for anything to move."""

IN_STEPS = 0.1
"""By how much longer ONNX Runtime takes for products between PyTorch's kernels than for one after the other. Where both
took equally long by themselves (an AMD EPYC, Zen 3), whole steps with all products in ONNX Runtime took longer than
with all in PyTorch: BERTs 1.08 (padded), 1.11 (for masked words) and 1.17 times, Llamas 1.04 (padded) and 1.12 times.
The one for masked words held 365 MiB instead of 290, since each of the two keeps its own freed memory."""

LARGE_PRODUCT = 1 << 25
"""Floating point operations of a product from which on the better kernel saves about what handing over costs."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Estimator:
    """Lets PyTorch run what it runs so much faster here that handing tensors over pays."""

    machine: Machine
    products: Products | None = None
    """What is known of large products by their own sizes."""

    def decides(self, node: fx.Node) -> bool:
        """Whether a node has a yardstick."""
        return has_yardstick(node.target) and _is_like_timed(node)

    def divided(self, assignment: Assignment) -> Assignment:
        """The assignment that costs least; the given one unless that saves enough."""
        ours = [node for node, runner in assignment.runner.items() if runner is Runner.ORT]
        large = [node for node in ours if node not in assignment.free and _is_large(node)]
        measured = {node: found for node in large if (found := self._estimate(node))}
        if not any(map(_is_faster, measured.values())) and not any(map(_is_half, large)):
            return assignment
        if (price := self.machine.price) is None:
            return assignment
        costs = self._costs(assignment, large, measured)
        readers = readers_of(costs, assignment.free)
        already = {node for node, runner in assignment.runner.items() if runner is Runner.PYTORCH}
        division = cheapest(costs, readers, price) - already
        before, after = (_total(costs, readers, there, price) for there in (already, already | division))
        if before - after < LEAST_GAIN * before:
            return assignment
        runner = assignment.runner | dict.fromkeys(division, Runner.PYTORCH)
        refusals = {node: _refusal(node, measured.get(node)) for node in division}
        return replace(assignment, runner=runner, refusals=assignment.refusals | refusals)

    def onednn_pays(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether PyTorch runs these faster than ONNX Runtime once oneDNN knows their sizes."""
        large = [node for node in nodes if _is_large(node)]
        measured = {node: found for node in large if (found := self._estimate(node, known_sizes=True))}
        costs = [_costs_of(node, found) for node, found in measured.items()]
        unknown = sum(self._reluctance(node) for node in large if node not in measured)
        return sum(cost.pytorch for cost in costs) + unknown < sum(cost.ort for cost in costs)

    def _estimate(self, node: fx.Node, known_sizes: bool = False) -> Yardstick | None:
        if not _is_like_timed(node):
            return None
        if self.products is not None and (timed := self.products.yardstick(node, known_sizes)):
            return timed
        found = self.machine.yardstick(node.target)
        return found.of(node) if found else None

    def _costs(
        self, assignment: Assignment, large: Iterable[fx.Node], measured: Mapping[fx.Node, Yardstick]
    ) -> Mapping[fx.Node, Costs]:
        """What each node takes on either side."""
        nodes = [(node, runner) for node, runner in assignment.runner.items() if node not in assignment.free]
        costs = {node: Costs(0.0, 0.0) if runner is Runner.ORT else Costs(math.inf, 0.0) for node, runner in nodes}
        costs |= {node: Costs(0.0, self._reluctance(node)) for node in large}
        return costs | {node: _costs_of(node, found) for node, found in measured.items()}

    def _reluctance(self, node: fx.Node) -> float:
        """By how much moving a node must pay that was not measured: by what may be wrong about taking it for equal.
        In a 16-bit type it need not: for the CPU ONNX Runtime has few kernels of those, and computes between casts."""
        if _is_half(node):
            return 0.0
        like = self.machine.yardstick(aten.mm.default if flops(node) else aten.add.Tensor)
        return ABOUT * like.of(node).ort if like else 0.0


def _costs_of(node: fx.Node, found: Yardstick) -> Costs:
    if _differ(found):
        return Costs(found.ort, found.pytorch)
    return Costs(found.ort * (1 + IN_STEPS if flops(node) else 1), found.ort)


def _is_faster(found: Yardstick) -> bool:
    """Whether PyTorch is, beyond doubt."""
    return _differ(found) and found.pytorch < found.ort


def _differ(found: Yardstick) -> bool:
    return abs(found.ort - found.pytorch) > ABOUT * max(found.ort, found.pytorch)


def _is_like_timed(node: fx.Node) -> bool:
    """Whether a node works as the yardsticks do: in single precision, and with no other power than a square is."""
    tensors = fakes_in(node.meta["val"])
    return bool(tensors) and tensors[0].dtype == torch.float32 and not is_long_power(node)


def _is_half(node: fx.Node) -> bool:
    """Whether a node reads or makes 16-bit numbers."""
    values = [node.meta["val"], *(argument.meta.get("val") for argument in node.all_input_nodes)]
    return any(tensor.dtype in HALVES for value in values for tensor in fakes_in(value))


def _is_large(node: fx.Node) -> bool:
    return bool(fakes_in(node.meta["val"])) and amount_of(node) >= (LARGE_PRODUCT if flops(node) else WORTH_A_CROSSING)


def _total(
    costs: Mapping[fx.Node, Costs], readers: Mapping[fx.Node, set[fx.Node]], pytorch: set[fx.Node], price: float
) -> float:
    """What a graph takes when PyTorch runs these nodes."""
    running = sum(cost.pytorch if node in pytorch else cost.ort for node, cost in costs.items())
    handed = sum(any((other in pytorch) != (node in pytorch) for other in others) for node, others in readers.items())
    return running + price * handed


def _refusal(node: fx.Node, found: Yardstick | None) -> Refusal:
    if found is not None and not _differ(found) and flops(node):
        return Refusal(Reason.SLOWER, f"about {_ms(found.pytorch)} on either side, and in whole steps less in PyTorch")
    if found is None or not _is_faster(found):
        return Refusal(Reason.SMALL, "what is next to it runs in PyTorch")
    return Refusal(Reason.SLOWER, f"about {_ms(found.pytorch)} in PyTorch, {_ms(found.ort)} in ONNX Runtime")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"
