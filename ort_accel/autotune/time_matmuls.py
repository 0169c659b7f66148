"""Times large products at their own sizes, called from PyTorch and in ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ort_accel.autotune.handover_cost import Handover
from ort_accel.autotune.node_kinds import kind_of
from ort_accel.autotune.throughput import KernelTimes, Machine, call_of, handover_of
from ort_accel.autotune.timer import measured, race
from ort_accel.graph.symbolic_sizes import hint
from ort_accel.operators.flops import flops
from ort_accel.runtime.sessions import Sessions

aten = torch.ops.aten

TIMED = {aten.mm.default, aten.addmm.default}

LARGE_FLOPS = 1 << 28
"""Operations from which on a product is timed at its own sizes."""

MIN_SHARE_SAVED_BY_ORT = 0.25
"""The share of PyTorch's time that ONNX Runtime has to save.

Its products take longer between PyTorch's kernels than alone, and times differ from one moment to the next.
"""

LONG_FLOPS = 1 << 29
"""Operations from which on the state of caches and threads makes no difference."""

MAX_TIMED_FLOPS = 1 << 31
"""Operations of the largest product that is timed whole. A larger one is cut along its largest dimension."""

MIN_TIMED_SIZE = 512
"""Smallest matrix dimension of a part that is timed."""

ROUNDS = 2


@dataclass(frozen=True)
class TimedMatmuls:
    """Times the large products of this process, each once."""

    machine: Machine

    def kernel_times(self, node: fx.Node) -> KernelTimes | None:
        """Returns the times of a large product on either side; None for other nodes."""
        is_plain = node.target in TIMED and not node.kwargs and node.meta["val"].dtype == torch.float32
        if not is_plain or flops(node) < LARGE_FLOPS:
            return None
        key = self.machine, kind_of(node, set()).key
        if key not in _KNOWN:
            _KNOWN[key] = _measured(self.machine, node)
        found = _KNOWN[key]
        if found is None:
            return None
        is_equal = (1 - MIN_SHARE_SAVED_BY_ORT) * found.pytorch < found.ort < found.pytorch
        return (replace(found, ort=found.pytorch) if is_equal else found).scaled_to(node)


_KNOWN: dict[tuple[Machine, str], KernelTimes | None] = {}
"""Times by machine and kind of product; None where nothing could be timed."""


def _measured(machine: Machine, node: fx.Node) -> KernelTimes | None:
    handover = handover_of(machine)
    return None if handover is None else measured(machine.settings.place, lambda: _race(machine, handover, node))


def _race(machine: Machine, handover: Handover, node: fx.Node) -> KernelTimes:
    assert isinstance(node.target, OpOverload)
    operands = _operands(node)
    module, call = call_of(node.target, operands)
    runs = kind_of(call, set(), call).runs(module, machine.opset, Sessions(machine.settings), {})
    seconds = race(runs, ROUNDS, in_a_row=1 if flops(call) > LONG_FLOPS else 2)
    costs = handover.without_start(seconds)
    return KernelTimes(costs.ort, costs.pytorch, flops(call))


def _operands(node: fx.Node) -> list[Tensor]:
    """Returns synthetic operands with the layouts of the node's. A long product gets a part of its sizes."""
    *row, left, right = (argument.meta["val"] for argument in node.args)  # type: ignore[union-attr]
    sizes = [hint(size) for size in (*left.shape, right.shape[1])]
    while 2 * prod(sizes) > MAX_TIMED_FLOPS and max(sizes) > MIN_TIMED_SIZE:
        largest = sizes.index(max(sizes))
        others = prod(sizes) // sizes[largest]
        sizes[largest] = max(MIN_TIMED_SIZE, min(MAX_TIMED_FLOPS // (2 * others), sizes[largest] // 2))
    rows, inner, columns = sizes
    return [
        *(_synthetic(one, columns) for one in row),
        _synthetic(left, rows, inner),
        _synthetic(right, inner, columns),
    ]


def _synthetic(like: Tensor, *sizes: int) -> Tensor:
    is_transposed = like.ndim == 2 and hint(like.stride(0)) < hint(like.stride(1))
    made = torch.empty(sizes[::-1] if is_transposed else sizes).uniform_(-0.1, 0.1)
    return made.t() if is_transposed else made
