"""Large products are timed at their own sizes: the libraries that multiply differ in the sizes that they are good at.

On an AMD EPYC (Zen 4) the scores of 143 words out of 30,522 took 34 ms in MKL, 19 ms in ONNX Runtime and 18 ms in
oneDNN; products of a layer took 5 to 20 % longer in MKL than in oneDNN. On an Intel Xeon MKL was the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.autotune.isolated import unnoticed
from ort_accel.autotune.node_kinds import kind_of
from ort_accel.autotune.throughput import Machine, Yardstick, call_of, handover_of, in_turns
from ort_accel.autotune.timer import Runs, Seconds
from ort_accel.graph.symbolic_sizes import expression, hint
from ort_accel.kernels.onednn_matmul import PRODUCTS, can_multiply, product, product_of_known_sizes
from ort_accel.operators.flops import flops
from ort_accel.reporting import Report, Runner
from ort_accel.runtime.ort_pool import release_unused
from ort_accel.runtime.sessions import Sessions

LARGE = 1 << 28
"""Floating point operations of a product, more than a millisecond of two cores, from which on it is timed by itself."""

GAIN = 0.03
"""The share of the time that oneDNN has to save."""

CLOSE = 1e-4
"""By how much the largest difference of two products may exceed rounding: of the largest number in them."""

CLEAR = 0.25
"""The share of PyTorch's time that ONNX Runtime has to save. Calls that are timed alone differ by a tenth from one
moment to the next, and in a step ONNX Runtime's take longer than alone, between kernels of PyTorch (`IN_STEPS`)."""

ONEDNN = "oneDNN"

LONG = 1 << 29
"""Operations from which on what a run leaves in the caches, and in the threads of others, makes no difference."""

ENOUGH = 1 << 31
"""Of a product with more operations a part is timed, with less of its largest side, so that it takes 10 ms."""

LEAST = 512
"""What is left of a side at the least."""

TURNS = 3


@dataclass(frozen=True)
class Times:
    """Seconds of a product."""

    ort: float
    pytorch: float
    onednn: float | None
    """None where oneDNN cannot, or gives something else."""
    amount: int
    """How many floating point operations it has."""

    @property
    def prefers_onednn(self) -> bool:
        """Whether oneDNN is the better one for PyTorch's share of the work."""
        return self.onednn is not None and self.onednn < (1 - GAIN) * self.pytorch


class Products:
    """Knows the products of this process that were timed."""

    def __init__(self, machine: Machine, report: Report) -> None:
        self._machine, self._report = machine, report

    def yardstick(self, node: fx.Node, known_sizes: bool = False) -> Yardstick | None:
        """What a large product takes on either side; None for other nodes. oneDNN counts for PyTorch where sizes are
        fixed, and for sizes that came before (`known_sizes`)."""
        found = self._times(node)
        if found is None:
            return None
        counts = found.prefers_onednn and (known_sizes or _is_of_fixed_size(node))
        pytorch = found.onednn if counts and found.onednn is not None else found.pytorch
        is_equal = (1 - CLEAR) * pytorch < found.ort < pytorch
        return Yardstick(pytorch if is_equal else found.ort, pytorch, found.amount).of(node)

    def replacements(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Callable[..., Tensor]]:
        """Which nodes of PyTorch's oneDNN runs faster, and what to call for them."""
        better = [node for node in nodes if (found := self._times(node)) and found.prefers_onednn]
        if better:
            self._report.counters["products by oneDNN, where sizes come again"] += len(better)
        return {node: product_of_known_sizes(node.target) for node in better}

    def for_known_sizes(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Callable[..., Tensor]]:
        """Which products of sizes that vary oneDNN runs faster than PyTorch, once it knows the sizes."""
        timed = ((node, self._times(node)) for node in nodes)
        better = (node for node, found in timed if found and found.prefers_onednn)
        return {node: product for node in better if not _is_of_fixed_size(node)}

    def _times(self, node: fx.Node) -> Times | None:
        is_plain = node.target in PRODUCTS and not node.kwargs and node.meta["val"].dtype == torch.float32
        if not is_plain or flops(node) < LARGE:
            return None
        key = self._machine, kind_of(node, set()).key
        if key not in _KNOWN:
            _KNOWN[key] = _measured(self._machine, node)
        return _KNOWN[key]


_KNOWN: dict[Any, Times | None] = {}
"""What was timed, by machine and kind of product."""


def _measured(machine: Machine, node: fx.Node) -> Times | None:
    handover = handover_of(machine)
    if handover is None:
        return None
    with unnoticed(machine.settings.place):
        try:
            operands = _operands(node)
            module, call = call_of(node.target, operands)
            runs = dict(kind_of(call, set(), call).runs(module, machine.opset, Sessions(machine.settings), {}))
            if can_multiply(node) and _agree(node.target(*operands), product(*operands)):  # type: ignore[operator]
                runs[ONEDNN] = partial(product, *operands)
            seconds = _shortest(runs, is_long=flops(call) > LONG)
        except Exception:  # then nothing is known to be faster
            return None
        finally:
            release_unused()
    ort = max(0.0, seconds[Runner.ORT.value] - handover.ort)
    pytorch = max(0.0, seconds[Runner.PYTORCH.value] - handover.pytorch)
    return Times(ort, pytorch, seconds.get(ONEDNN), flops(call))


def _operands(node: fx.Node) -> list[Tensor]:
    """Made-up ones that lie in memory as the node's do, of its sizes or, if that is too much, of a part of them."""
    *row, left, right = (argument.meta["val"] for argument in node.args)  # type: ignore[union-attr]
    sizes = [hint(size) for size in (*left.shape, right.shape[1])]
    while 2 * prod(sizes) > ENOUGH and max(sizes) > LEAST:
        largest = sizes.index(max(sizes))
        others = prod(sizes) // sizes[largest]
        sizes[largest] = max(LEAST, min(ENOUGH // (2 * others), sizes[largest] // 2))
    rows, inner, columns = sizes
    return [*(_made_up(one, columns) for one in row), _made_up(left, rows, inner), _made_up(right, inner, columns)]


def _made_up(like: Tensor, *sizes: int) -> Tensor:
    is_transposed = like.ndim == 2 and hint(like.stride(0)) < hint(like.stride(1))
    made = torch.empty(sizes[::-1] if is_transposed else sizes).uniform_(-0.1, 0.1)
    return made.t() if is_transposed else made


def _shortest(runs: Runs, is_long: bool) -> Seconds:
    if not is_long:
        return in_turns(runs, TURNS)
    for run in runs.values():
        run()
    return in_turns(runs, TURNS - 1, in_a_row=1)


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= CLOSE * one.abs().max())


def _is_of_fixed_size(node: fx.Node) -> bool:
    fakes = [node.meta["val"], *(argument.meta["val"] for argument in node.all_input_nodes)]
    return all(isinstance(expression(size), int) for fake in fakes for size in fake.shape)
