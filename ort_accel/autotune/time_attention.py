"""Whether attention runs as products in ONNX Runtime, by a measurement of this machine.

A call of each kernel takes some time to begin, and then so much for each pair of a query and a key. So both are timed
on few pairs and on many, which tells from how many on products are the faster ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ort_accel.autotune.isolated import unnoticed
from ort_accel.autotune.throughput import Machine, in_turns
from ort_accel.autotune.timer import Runs
from ort_accel.errors import first_line
from ort_accel.graph.symbolic_sizes import hint
from ort_accel.kernels import attention_packed, attention_slim
from ort_accel.kernels.attention_dense import PYTORCH, Failed, How, Kernels
from ort_accel.kernels.attention_matmul import AttentionProducts
from ort_accel.kernels.attention_precision import BACKWARD, FORWARD
from ort_accel.kernels.packed_rows import own
from ort_accel.reporting import Report
from ort_accel.runtime.ort_pool import release_unused
from ort_accel.runtime.picklable_closures import made_by
from ort_accel.runtime.sessions import Sessions

LOG = logging.getLogger("ort_accel")

LENGTHS = (128, 512)
"""Sequences that are timed: those closest to a graph's."""

HEADS = 4

FEW = (1, 32)
MANY = 1 << 20
"""Sequences and their length, and pairs of all heads."""

TURNS = 9

GAIN = 0.1
"""The share of the time that products have to save: so much a busy machine gets wrong."""


class LargeByProducts:
    """PyTorch's kernels, and products in ONNX Runtime for at least so many pairs."""

    def __init__(self, products: Kernels, least: float) -> None:
        self._products, self._least = products, least
        self._failed = False

    def drops(self, query: Tensor, pairs: int) -> bool:
        """Whether products run a dropout."""
        is_single = query.dtype == torch.float32 and query.device.type == "cpu"
        return is_single and not self._failed and pairs >= max(1, self._least)

    def forward(self, operands: Sequence[Tensor], how: How) -> Sequence[Tensor]:
        """The result, and what the kernel that made it needs for the gradient."""
        query, key, _ = operands
        if self._takes(query, key, how) and (found := self._tried(self._products.forward, operands, how)):
            return found
        return PYTORCH.forward(operands, how)

    def backward(self, operands: Sequence[Tensor], how: How) -> Sequence[Tensor]:
        """The gradients of query, key and value."""
        grad, *given, out, sums = operands
        if self._takes(given[0], given[1], how) and (found := self._tried(self._products.backward, operands, how)):
            return found
        if self._failed and not sums.any():  # the result came from products
            out, sums = PYTORCH.forward(given, how)
        return PYTORCH.backward((grad, *given, out, sums), how)

    def _takes(self, query: Tensor, key: Tensor, how: How) -> bool:
        samples, heads, queries = query.shape[:3]
        return how.mask is None and self.drops(query, samples * heads * queries * key.shape[2])

    def _tried(self, run: Callable[..., Sequence[Tensor]], operands: Sequence[Tensor], how: How) -> Sequence[Tensor]:
        """What products give; nothing where they fail, which is left to PyTorch from then on: it takes less memory."""
        try:
            return run(operands, how)
        except Exception as error:
            self._failed = True
            LOG.warning("ONNX Runtime failed at attention, which PyTorch runs from now on: %s", first_line(error))
            if how.kept is not None:
                raise Failed from error
            return ()


class Attention:
    """Knows which attentions of PyTorch's ONNX Runtime runs faster as products."""

    def __init__(self, machine: Machine, report: Report) -> None:
        self._machine, self._report = machine, report

    def replacements(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Callable[..., Any]]:
        """What to call for these nodes."""
        found = {node: call for node in nodes if node.target in _CALLS and (call := self._call(node))}
        if found:
            self._report.counters["attention by products of ONNX Runtime, where there are many tokens"] += len(found)
        return found

    def _call(self, node: fx.Node) -> Callable[..., Any] | None:
        query: Tensor = node.all_input_nodes[0].meta["val"]
        if query.dtype != torch.float32 or query.device.type != "cpu":
            return None
        tokens = _tokens(node)
        length = min(LENGTHS, key=lambda length: abs(length - tokens))
        kernels = _measured(self._machine, length, hint(query.shape[-1]))
        if kernels is None:
            return None
        return _with(kernels, _CALLS[node.target])


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *more: Any,
    kernels: Kernels,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    is_causal = more[1] if len(more) > 1 else is_causal  # behind the share that is dropped, which is 0 on the CPU
    return kernels.forward((query, key, value), How(attn_mask, is_causal, scale))


def _plain_backward(
    *operands: Any, kernels: Kernels, attn_mask: Tensor | None = None, scale: float | None = None
) -> Any:
    *tensors, _, is_causal = operands
    return kernels.backward(tensors, How(attn_mask, is_causal, scale))


_CALLS: dict[Any, Callable[..., Any]] = {
    FORWARD: _plain,
    BACKWARD: _plain_backward,
    attention_slim.LEAN_FORWARD.default: attention_slim.attention,
    attention_slim.LEAN_BACKWARD.default: attention_slim.attention_backward,
    own.scaled_dot_product_of_rows.default: attention_packed.attention,
    own.scaled_dot_product_of_rows_backward.default: attention_packed.attention_backward,
}
"""The operators, and what computes each with given kernels."""


def _with(kernels: Kernels, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **named, kernels=kernels)

    call.__name__ = f"{function.__name__.lstrip('_')}_by_products"
    return made_by(call, _with, kernels, function)


def _tokens(node: fx.Node) -> float:
    """How long a sequence is, on average, as far as the captured sizes tell."""
    tensors = [argument.meta["val"] for argument in node.args if isinstance(argument, fx.Node)]
    if "of_rows" not in str(node.target):
        return hint(tensors[0].shape[2])
    spans = next(tensor for tensor in tensors if not tensor.is_floating_point())
    return hint(tensors[0].shape[0]) / max(1, hint(spans.shape[0]))


@cache
def _measured(machine: Machine, length: int, width: int) -> LargeByProducts | None:
    """Products from as many pairs on as pay; None where they never do."""
    products = AttentionProducts(Sessions(machine.settings))
    sizes = FEW, (max(1, MANY // (HEADS * length**2)), length)
    with unnoticed(machine.settings.place):
        try:
            times = [in_turns(_runs(products, *size, width), TURNS, in_a_row=1) for size in sizes]
        except Exception:  # then nothing is known to be faster
            return None
        finally:
            release_unused()
    pairs = [samples * HEADS * tokens**2 for samples, tokens in sizes]
    saved = [(1 - GAIN) * seconds["pytorch"] - seconds["products"] for seconds in times]
    least = _least(pairs, saved)
    return None if least is None else LargeByProducts(products, least)


def _runs(products: Kernels, samples: int, tokens: int, width: int) -> Runs:
    """Both directions of an attention by each of the kernels."""
    made = [torch.empty(samples, tokens, HEADS, width).uniform_(-1, 1).transpose(1, 2) for _ in range(4)]
    grad, *given = made
    how = How(None, False, None)

    def run(kernels: Kernels) -> None:
        kernels.backward((grad, *given, *kernels.forward(given, how)), how)

    return {"pytorch": lambda: run(PYTORCH), "products": lambda: run(products)}


def _least(pairs: Sequence[int], saved: Sequence[float]) -> float | None:
    """From how many pairs on time is saved, as a straight line through two points tells."""
    (few, many), (at_few, at_many) = pairs, saved
    if at_many <= 0:
        return None
    return 0.0 if at_few >= 0 else few - at_few * (many - few) / (at_many - at_few)
