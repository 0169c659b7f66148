"""How fast a machine's PyTorch and ONNX Runtime are at what most of a step's time goes to, measured once.

Which of the two is faster differs from processor to processor: on an AMD EPYC (Zen 4) both multiply matrices equally
fast, on an Intel Xeon with AMX PyTorch's MKL takes four fifths of the time. So one call of each operator is timed on
either side, when the first graph needs to know, and holds for all sizes of it in this process.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from ort_accel.autotune import handover_cost
from ort_accel.autotune.isolated import unnoticed
from ort_accel.autotune.node_kinds import kind_of
from ort_accel.autotune.timer import Runs, Seconds, Stopwatch
from ort_accel.graph.nodes import fakes_in
from ort_accel.graph.symbolic_sizes import hinted_elements
from ort_accel.operators.flops import flops
from ort_accel.reporting import Runner
from ort_accel.runtime.ort_pool import release_unused
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions

aten = torch.ops.aten

Calls = list[tuple[Any, ...]]

ROWS, WIDTH = 1024, 512

TURNS = 9
"""Calls on either side. The shortest counts: what else a machine does can only make one longer."""


def _rows(*shape: int) -> Tensor:
    return torch.empty(shape or (ROWS, WIDTH), dtype=torch.float32, device="cpu").uniform_(-0.1, 0.1)


def _products() -> Calls:
    """As in a layer and in its backward: how fast a product is depends on how its operands lie in memory. Larger ones
    are timed at their own sizes (`tune/products.py`)."""
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
    """Of one half of each row, and of every other number, as of halves that lie next to each other and in turns."""
    count = ROWS // 4
    return [(_rows(count, WIDTH), [count, 2 * WIDTH], 1, 0, *more) for more in ((WIDTH, 1), (2 * WIDTH, 2))]


CALLS: dict[Any, Callable[[], Calls]] = {
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
"""Calls of each operator, in single precision, large enough for all threads."""

LIKE = {aten.addmm.default: aten.mm.default, aten.sub.Tensor: aten.add.Tensor}
"""Operators that take as long as others."""


@dataclass(frozen=True)
class Yardstick:
    """What calls took on either side, in seconds, without what it takes to begin."""

    ort: float
    pytorch: float
    amount: int
    """How much they computed."""

    def of(self, node: fx.Node) -> Yardstick:
        """What a node takes by this measure."""
        share = amount_of(node) / self.amount
        return Yardstick(self.ort * share, self.pytorch * share, amount_of(node))


@dataclass(frozen=True)
class Machine:
    """What is known of this process's machine, with one number of threads."""

    settings: SessionSettings
    opset: int

    @property
    def price(self) -> float | None:
        """Seconds for handing a tensor over to the other side; None if it cannot be measured now."""
        return found.price if (found := handover_of(self)) else None

    def yardstick(self, target: Any) -> Yardstick | None:
        """The measure for an operator; None if it has none, or cannot be run here."""
        return _measured(self, LIKE.get(target, target)) if has_yardstick(target) else None


def has_yardstick(target: Any) -> bool:
    """Whether an operator is one of those that are timed."""
    return LIKE.get(target, target) in CALLS


def amount_of(node: fx.Node) -> int:
    """What a node's time grows with: operations of a product, or elements of the largest tensor."""
    given = [argument.meta.get("val") for argument in node.all_input_nodes]
    tensors = [tensor for value in (node.meta["val"], *given) for tensor in fakes_in(value)]
    return flops(node) or max(map(hinted_elements, tensors))


@cache
def handover_of(machine: Machine) -> handover_cost.Handover | None:
    """What changing hands costs; None if it cannot be measured now."""
    with unnoticed(machine.settings.place):
        try:
            runs = handover_cost.runs(machine.opset, Sessions(machine.settings))
            seconds = Stopwatch().race(handover_cost.SUBJECT, runs, in_a_row=3)
        except Exception:  # then nothing is known to be faster
            return None
    return handover_cost.handover(seconds) if seconds else None


@cache
def _measured(machine: Machine, target: Any) -> Yardstick | None:
    handover = handover_of(machine)
    if handover is None:
        return None
    with unnoticed(machine.settings.place):
        try:
            timed = [_timed(machine, handover, *call_of(target, arguments)) for arguments in CALLS[target]()]
        except Exception:  # there is no kernel for it: who runs it is no question of speed
            return None
        finally:
            release_unused()  # the pool holds what the largest call took
    return Yardstick(sum(one.ort for one in timed), sum(one.pytorch for one in timed), sum(one.amount for one in timed))


def _timed(machine: Machine, handover: handover_cost.Handover, module: fx.GraphModule, node: fx.Node) -> Yardstick:
    seconds = in_turns(kind_of(node, set(), node).runs(module, machine.opset, Sessions(machine.settings), {}))
    ort, pytorch = seconds[Runner.ORT.value], seconds[Runner.PYTORCH.value]
    return Yardstick(max(0.0, ort - handover.ort), max(0.0, pytorch - handover.pytorch), amount_of(node))


def in_turns(runs: Runs, turns: int = TURNS, in_a_row: int = 2) -> Seconds:
    """The shortest time of each of these runs. Of those in a row the last one counts: a run behind another one on the
    same side, since changing hands has a price of its own."""
    taken = [{name: _last_of(run, in_a_row) for name, run in runs.items()} for _ in range(turns)]
    return {name: min(turn[name] for turn in taken) for name in runs}


def _last_of(run: Callable[[], object], in_a_row: int) -> float:
    for _ in range(in_a_row - 1):
        run()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def call_of(target: Any, arguments: Sequence[Any]) -> tuple[fx.GraphModule, fx.Node]:
    """A graph that calls an operator with arguments like these, and the call in it. It holds no memory: a graph stays
    until cycles of references are collected, and that can take long."""
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
            graph.call_function(operator.getitem, (node, number)).meta["val"] = result
    return fx.GraphModule({}, graph), node
