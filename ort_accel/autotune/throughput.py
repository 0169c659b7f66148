"""Times one call of each frequent operator in PyTorch and in ONNX Runtime.

Which of the two is faster differs from processor to processor. A call is timed when the first graph needs to know. Its
time holds for all sizes in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import getitem

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from ort_accel.autotune import handover_cost
from ort_accel.autotune.node_kinds import kind_of
from ort_accel.autotune.timer import Stopwatch, measured, race
from ort_accel.graph.nodes import fakes_in
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.operators.flops import flops
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions

aten = torch.ops.aten

Calls = list[tuple[object, ...]]
"""The arguments of each call of one operator."""

ROWS, WIDTH = 1024, 512


def _rows(*shape: int) -> Tensor:
    return torch.empty(shape or (ROWS, WIDTH), dtype=torch.float32, device="cpu").uniform_(-0.1, 0.1)


def _products() -> Calls:
    """Products of a layer and of its backward, since a product's speed depends on the layout of its operands.

    Larger ones are timed at their own sizes (`time_matmuls.py`).
    """
    return [
        (_rows(256, 384), _rows(768, 384).t()),
        (_rows(256, 768), _rows(768, 384)),
        (_rows(256, 768).t(), _rows(256, 384)),
    ]


def _grouped_products() -> Calls:
    return [
        (_rows(32, 128, 64), _rows(32, 128, 64).mT),
        (_rows(32, 128, 128), _rows(32, 128, 64)),
        (_rows(32, 128, 128).mT, _rows(32, 128, 64)),
    ]


def _norm() -> Calls:
    return [(_rows(), [WIDTH], _rows(WIDTH), _rows(WIDTH), 1e-5)]


def _norm_backward() -> Calls:
    return [(_rows(), _rows(), [WIDTH], _rows(ROWS, 1), _rows(ROWS, 1), _rows(WIDTH), _rows(WIDTH), [True, True, True])]


def _slices_backward() -> Calls:
    """Slices of one half of each row, and of every other number, as models split a row into halves."""
    count = ROWS // 4
    return [(_rows(count, WIDTH), [count, 2 * WIDTH], 1, 0, *more) for more in ((WIDTH, 1), (2 * WIDTH, 2))]


CALLS: dict[OpOverload, Callable[[], Calls]] = {
    aten.mm.default: _products,
    aten.bmm.default: _grouped_products,
    aten.add.Tensor: lambda: [(_rows(), _rows())],
    aten.mul.Tensor: lambda: [(_rows(), _rows())],
    aten.sum.dim_IntList: lambda: [(_rows(), [0], True)],
    aten.gelu.default: lambda: [(_rows(),)],
    aten.gelu_backward.default: lambda: [(_rows(), _rows())],
    aten.silu.default: lambda: [(_rows(),)],
    aten.silu_backward.default: lambda: [(_rows(), _rows())],
    aten.native_layer_norm.default: _norm,
    aten.native_layer_norm_backward.default: _norm_backward,
    aten._softmax.default: lambda: [(_rows(), -1, False)],
    aten._softmax_backward_data.default: lambda: [(_rows(), _rows(), -1, torch.float32)],
    aten.div.Tensor: lambda: [(_rows(), _rows())],
    aten.pow.Tensor_Scalar: lambda: [(_rows(), 2)],
    aten.exp.default: lambda: [(_rows(),)],
    aten.tanh.default: lambda: [(_rows(),)],
    aten.sigmoid.default: lambda: [(_rows(),)],
    aten.clamp.default: lambda: [(_rows(), -0.05, 0.05)],
    aten.mean.dim: lambda: [(_rows(), [-1], True)],
    aten.amax.default: lambda: [(_rows(), [-1], True)],
    aten.max.dim: lambda: [(_rows(), -1, True)],
    aten.where.self: lambda: [(_rows() > 0, _rows(), _rows())],
    aten.masked_fill.Scalar: lambda: [(_rows(), _rows() > 0, 0.0)],
    aten.cat.default: lambda: [([_rows(), _rows()], -1)],
    aten.scatter.src: lambda: [(_rows(), -1, torch.zeros(ROWS, 1, dtype=torch.int64), _rows(ROWS, 1))],
    aten.slice_backward.default: _slices_backward,
}
"""Calls of each operator in single precision. They are large enough for all threads."""

EQUALLY_FAST: dict[object, OpOverload] = {aten.addmm.default: aten.mm.default, aten.sub.Tensor: aten.add.Tensor}
"""Untimed operators to timed ones that take as long."""


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of calls on either side, without what starting a segment takes."""

    ort: float
    pytorch: float
    amount: int
    """The operations or elements that the calls computed (`amount_of`)."""

    def scaled_to(self, node: fx.Node) -> KernelTimes:
        """Returns the times of a node, in proportion to its amount."""
        share = amount_of(node) / self.amount
        return KernelTimes(self.ort * share, self.pytorch * share, amount_of(node))


@dataclass(frozen=True)
class Machine:
    """The speed of this machine with one number of threads."""

    settings: SessionSettings
    opset: int

    @property
    def price(self) -> float | None:
        """Seconds of one handover; None if it cannot be measured now."""
        return found.price if (found := handover_of(self)) else None

    def kernel_times(self, target: object) -> KernelTimes | None:
        """Returns the times of an operator; None if it is not timed, or cannot be run here."""
        timed = _timed_operator(target)
        return None if timed is None else _measured(self, timed)


def is_timed(target: object) -> bool:
    """True if calls of an operator, or of one that takes as long, are timed."""
    return _timed_operator(target) is not None


def _timed_operator(target: object) -> OpOverload | None:
    operator = EQUALLY_FAST.get(target, target)
    return operator if isinstance(operator, OpOverload) and operator in CALLS else None


def amount_of(node: fx.Node) -> int:
    """Returns what a node's time grows with: the operations of a product, or the elements of the largest tensor."""
    given = [argument.meta.get("val") for argument in node.all_input_nodes]
    tensors = [tensor for value in (node.meta["val"], *given) for tensor in fakes_in(value)]
    return flops(node) or max(map(hinted_elements, tensors))


@cache
def handover_of(machine: Machine) -> handover_cost.Handover | None:
    """Returns what a handover costs; None if it cannot be measured now."""
    measure = partial(handover_cost.measure, machine.opset, Sessions(machine.settings), Stopwatch())
    seconds = measured(machine.settings.place, measure)
    return handover_cost.Handover.of(seconds) if seconds else None


@cache
def _measured(machine: Machine, target: OpOverload) -> KernelTimes | None:
    handover = handover_of(machine)
    if handover is None:
        return None

    def measure() -> KernelTimes:
        timed = [_timed(machine, handover, *call_of(target, arguments)) for arguments in CALLS[target]()]
        ort, pytorch = sum(one.ort for one in timed), sum(one.pytorch for one in timed)
        return KernelTimes(ort, pytorch, sum(one.amount for one in timed))

    return measured(machine.settings.place, measure)


def _timed(machine: Machine, handover: handover_cost.Handover, module: fx.GraphModule, node: fx.Node) -> KernelTimes:
    runs = kind_of(node, set(), node).runs(module, machine.opset, Sessions(machine.settings), {})
    costs = handover.without_start(race(runs, in_a_row=2))
    return KernelTimes(costs.ort, costs.pytorch, amount_of(node))


PEAK_SIDE = 1024
"""Rows and columns of the product whose speed stands for a machine's peak."""


@cache
def peak_flops_per_s(machine: Machine, dtype: torch.dtype) -> float | None:
    """Returns the speed of a large product, of PyTorch's or ONNX Runtime's, the faster; None if it cannot be measured.

    ONNX Runtime's is measured for single precision on the CPU, where it may be the faster one.
    """
    place = machine.settings.place

    def measure() -> float:
        left, right, result = (torch.ones(PEAK_SIDE, PEAK_SIDE, dtype=dtype, device=place.device) for _ in range(3))
        seconds = Stopwatch(settle=place.settle).race({"": lambda: torch.mm(left, right, out=result)})
        assert seconds is not None
        best = seconds[""]
        handover = handover_of(machine) if dtype == torch.float32 and not place.is_cuda else None
        if handover is not None:
            best = min(best, _timed(machine, handover, *call_of(aten.mm.default, (left, right))).ort)
        return 2 * PEAK_SIDE**3 / best

    return measured(place, measure)


def call_of(target: OpOverload, arguments: Sequence[object]) -> tuple[fx.GraphModule, fx.Node]:
    """Returns a graph that calls an operator with arguments like these, and the call in it.

    The graph holds no tensors, since it may live long: until cycles of references are collected.
    """
    graph, mode = fx.Graph(), FakeTensorMode()

    def given(tensor: Tensor) -> fx.Node:
        node = graph.placeholder(f"given_{len(graph.nodes)}")
        node.meta["val"] = mode.from_tensor(tensor)
        return node

    nodes = tree_map_only(Tensor, given, tuple(arguments))
    node = graph.call_function(target, nodes)
    with mode:
        node.meta["val"] = results = target(*tree_map_only(fx.Node, lambda given: given.meta["val"], nodes))
    if isinstance(results, tuple):
        for number, result in enumerate(results):
            graph.call_function(getitem, (node, number)).meta["val"] = result
    return fx.GraphModule({}, graph), node
