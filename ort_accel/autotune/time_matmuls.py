"""Times large products at their own sizes in MKL, oneDNN and ONNX Runtime: each library is good at other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ort_accel.autotune.handover_cost import Handover
from ort_accel.autotune.node_kinds import kind_of
from ort_accel.autotune.throughput import KernelTimes, Machine, call_of, handover_of
from ort_accel.autotune.timer import measured, race
from ort_accel.graph.symbolic_sizes import expression, hint
from ort_accel.kernels.onednn_matmul import ONEDNN_OPERATORS, can_multiply, onednn_for_frequent_sizes, onednn_product
from ort_accel.operators.flops import flops
from ort_accel.reporting import Report
from ort_accel.runtime.sessions import Sessions

LARGE_FLOPS = 1 << 28
"""Operations from which on a product is timed at its own sizes."""

MIN_SHARE_SAVED_BY_ONEDNN = 0.03
"""The share of PyTorch's time that oneDNN has to save."""

MIN_SHARE_SAVED_BY_ORT = 0.25
"""The share of PyTorch's time that ONNX Runtime has to save.

Its products take longer between PyTorch's kernels than alone, and times differ from one moment to the next.
"""

MAX_RELATIVE_DIFFERENCE = 1e-4
"""The largest difference between two libraries' results, as a share of the largest number in them."""

ONEDNN = "oneDNN"

LONG_FLOPS = 1 << 29
"""Operations from which on the state of caches and threads makes no difference."""

MAX_TIMED_FLOPS = 1 << 31
"""Operations of the largest product that is timed whole. A larger one is cut along its largest dimension."""

MIN_TIMED_SIZE = 512
"""Smallest matrix dimension of a part that is timed."""

ROUNDS = 2


@dataclass(frozen=True)
class MatmulTimes:
    """Seconds of a product."""

    ort: float
    pytorch: float
    onednn: float | None
    """None where oneDNN cannot multiply, or gives another result."""
    amount: int
    """Floating point operations."""

    @property
    def prefers_onednn(self) -> bool:
        """True if PyTorch should multiply with oneDNN."""
        return self.onednn is not None and self.onednn < (1 - MIN_SHARE_SAVED_BY_ONEDNN) * self.pytorch


class TimedMatmuls:
    """Times the large products of this process, each once."""

    def __init__(self, machine: Machine, report: Report) -> None:
        self._machine, self._report = machine, report

    def kernel_times(self, node: fx.Node, known_sizes: bool = False, called: bool = False) -> KernelTimes | None:
        """Returns the times of a large product on either side; None for other nodes.

        oneDNN counts for PyTorch where sizes are fixed, and for sizes that came before (`known_sizes`), but not where a
        session calls PyTorch's operator (`called`).
        """
        found = self._times(node)
        if found is None:
            return None
        uses_onednn = found.prefers_onednn and not called and (known_sizes or _is_of_fixed_size(node))
        pytorch = found.onednn if uses_onednn and found.onednn is not None else found.pytorch
        is_equal = (1 - MIN_SHARE_SAVED_BY_ORT) * pytorch < found.ort < pytorch
        return KernelTimes(pytorch if is_equal else found.ort, pytorch, found.amount).scaled_to(node)

    def replacements(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Callable[..., Tensor]]:
        """Returns the nodes of PyTorch that oneDNN runs faster, with what to call for them."""
        better = [node for node in nodes if (found := self._times(node)) and found.prefers_onednn]
        if better:
            self._report.counters["products by oneDNN, where sizes come again"] += len(better)
        return {node: onednn_for_frequent_sizes(node.target) for node in better}

    def for_known_sizes(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Callable[..., Tensor]]:
        """Returns the products of varying sizes that oneDNN runs faster than PyTorch, once it knows the sizes."""
        timed = ((node, self._times(node)) for node in nodes)
        better = (node for node, found in timed if found and found.prefers_onednn)
        return {node: onednn_product for node in better if not _is_of_fixed_size(node)}

    def _times(self, node: fx.Node) -> MatmulTimes | None:
        is_plain = node.target in ONEDNN_OPERATORS and not node.kwargs and node.meta["val"].dtype == torch.float32
        if not is_plain or flops(node) < LARGE_FLOPS:
            return None
        key = self._machine, kind_of(node, set()).key
        if key not in _KNOWN:
            _KNOWN[key] = _measured(self._machine, node)
        return _KNOWN[key]


_KNOWN: dict[tuple[Machine, str], MatmulTimes | None] = {}
"""Times by machine and kind of product; None where nothing could be timed."""


def _measured(machine: Machine, node: fx.Node) -> MatmulTimes | None:
    handover = handover_of(machine)
    return None if handover is None else measured(machine.settings.place, lambda: _race(machine, handover, node))


def _race(machine: Machine, handover: Handover, node: fx.Node) -> MatmulTimes:
    assert isinstance(node.target, OpOverload)
    operands = _operands(node)
    module, call = call_of(node.target, operands)
    runs = dict(kind_of(call, set(), call).runs(module, machine.opset, Sessions(machine.settings), {}))
    if can_multiply(node) and _agree(node.target(*operands), onednn_product(*operands)):
        runs[ONEDNN] = partial(onednn_product, *operands)
    seconds = race(runs, ROUNDS, in_a_row=1 if flops(call) > LONG_FLOPS else 2)
    costs = handover.without_start(seconds)
    return MatmulTimes(costs.ort, costs.pytorch, seconds.get(ONEDNN), flops(call))


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


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= MAX_RELATIVE_DIFFERENCE * one.abs().max())


def _is_of_fixed_size(node: fx.Node) -> bool:
    fakes = [node.meta["val"], *(argument.meta["val"] for argument in node.all_input_nodes)]
    return all(isinstance(expression(size), int) for fake in fakes for size in fake.shape)
