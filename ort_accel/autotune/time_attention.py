"""Times attention as products in ONNX Runtime against PyTorch's kernels, and runs large attention by the faster one.

The time of a kernel is a constant and a part that grows with the pairs of a query and a key. So both are timed on few
pairs and on many. A straight line tells from how many pairs on products are faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.node import Target

from ort_accel.autotune.throughput import Machine
from ort_accel.autotune.timer import Runs, measured, race
from ort_accel.errors import first_line
from ort_accel.graph.symbolic_sizes import hint
from ort_accel.kernels import attention_packed, attention_slim
from ort_accel.kernels.attention_dense import PYTORCH_ATTENTION, AttentionFailed, AttentionKernels, AttentionOptions
from ort_accel.kernels.attention_matmul import AttentionProducts
from ort_accel.kernels.attention_precision import FLASH_BACKWARD, FLASH_FORWARD
from ort_accel.kernels.packed_rows import own
from ort_accel.reporting import Report
from ort_accel.runtime.picklable_closures import picklable_by
from ort_accel.runtime.sessions import Sessions

Call: TypeAlias = Callable[..., object]

LOG = logging.getLogger("ort_accel")

LENGTHS = (128, 512)
"""Lengths of the sequences that are timed. The one closest to a graph's counts for it."""

HEADS = 4

FEW_SEQUENCES, FEW_TOKENS = 1, 32
MANY_PAIRS = 1 << 20
"""Pairs of all heads."""

MIN_SHARE_SAVED = 0.1
"""The share of the time that products have to save: a busy machine is wrong by about as much."""


class AttentionBySize:
    """PyTorch's kernels, and products in ONNX Runtime from a number of pairs on."""

    def __init__(self, products: AttentionKernels, min_pairs: float) -> None:
        self._products, self._min_pairs = products, min_pairs
        self._failed = False

    def drops(self, query: Tensor, pairs: int) -> bool:
        """True if products run a dropout."""
        is_single = query.dtype == torch.float32 and query.device.type == "cpu"
        return is_single and not self._failed and pairs >= max(1, self._min_pairs)

    def forward(self, operands: Sequence[Tensor], how: AttentionOptions) -> Sequence[Tensor]:
        """Returns the result, and what the kernel that made it needs for the gradient."""
        query, key, _ = operands
        if self._takes(query, key, how) and (found := self._try(self._products.forward, operands, how)):
            return found
        return PYTORCH_ATTENTION.forward(operands, how)

    def backward(self, operands: Sequence[Tensor], how: AttentionOptions) -> Sequence[Tensor]:
        """Returns the gradients of query, key and value."""
        grad, *given, out, sums = operands
        if self._takes(given[0], given[1], how) and (found := self._try(self._products.backward, operands, how)):
            return found
        if self._failed and not sums.any():  # the result came from products
            out, sums = PYTORCH_ATTENTION.forward(given, how)
        return PYTORCH_ATTENTION.backward((grad, *given, out, sums), how)

    def _takes(self, query: Tensor, key: Tensor, how: AttentionOptions) -> bool:
        samples, heads, queries = query.shape[:3]
        return how.mask is None and self.drops(query, samples * heads * queries * key.shape[2])

    def _try(
        self,
        run: Callable[[Sequence[Tensor], AttentionOptions], Sequence[Tensor]],
        operands: Sequence[Tensor],
        how: AttentionOptions,
    ) -> Sequence[Tensor]:
        """Returns the result of products; nothing where they fail. From then on PyTorch runs, in less memory."""
        try:
            return run(operands, how)
        except Exception as error:
            self._failed = True
            LOG.warning("ONNX Runtime failed at attention, which PyTorch runs from now on: %s", first_line(error))
            if how.kept is not None:
                raise AttentionFailed from error
            return ()


class TimedAttention:
    """Replaces attention of PyTorch that ONNX Runtime runs faster as products."""

    def __init__(self, machine: Machine, report: Report) -> None:
        self._machine, self._report = machine, report

    def replacements(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Call]:
        """Returns the nodes that run faster as products, with what to call for them."""
        found = {node: call for node in nodes if node.target in _CALLS and (call := self._call(node))}
        if found:
            self._report.counters["attention by products of ONNX Runtime, where there are many tokens"] += len(found)
        return found

    def _call(self, node: fx.Node) -> Call | None:
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
    *more: bool,
    kernels: AttentionKernels,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Sequence[Tensor]:
    is_causal = more[1] if len(more) > 1 else is_causal  # behind the share that is dropped, which is 0 on the CPU
    return kernels.forward((query, key, value), AttentionOptions(attn_mask, is_causal, scale))


def _plain_backward(
    *operands: Any, kernels: AttentionKernels, attn_mask: Tensor | None = None, scale: float | None = None
) -> Sequence[Tensor]:
    *tensors, _, is_causal = operands
    return kernels.backward(tensors, AttentionOptions(attn_mask, is_causal, scale))


_CALLS: dict[Target, Call] = {
    FLASH_FORWARD: _plain,
    FLASH_BACKWARD: _plain_backward,
    attention_slim.SLIM_FORWARD.default: attention_slim.attention,
    attention_slim.SLIM_BACKWARD.default: attention_slim.attention_backward,
    own.scaled_dot_product_of_rows.default: attention_packed.attention,
    own.scaled_dot_product_of_rows_backward.default: attention_packed.attention_backward,
}
"""Attention operators, with the functions that compute them by given kernels."""


def _with(kernels: AttentionKernels, function: Call) -> Call:
    def call(*given: object, **named: object) -> object:
        return function(*given, **named, kernels=kernels)

    call.__name__ = f"{function.__name__.lstrip('_')}_by_products"
    return picklable_by(call, _with, kernels, function)


def _tokens(node: fx.Node) -> float:
    """Returns the average length of a sequence, at the sizes that the graph was captured with."""
    tensors = [argument.meta["val"] for argument in node.args if isinstance(argument, fx.Node)]
    if "of_rows" not in str(node.target):
        return hint(tensors[0].shape[2])
    spans = next(tensor for tensor in tensors if not tensor.is_floating_point())
    return hint(tensors[0].shape[0]) / max(1, hint(spans.shape[0]))


@cache
def _measured(machine: Machine, length: int, width: int) -> AttentionBySize | None:
    """Returns kernels that use products from the number of pairs on that pays; None if none does."""
    products = AttentionProducts(Sessions(machine.settings))
    sizes = (FEW_SEQUENCES, FEW_TOKENS), (max(1, MANY_PAIRS // (HEADS * length**2)), length)
    times = measured(machine.settings.place, lambda: [race(_runs(products, *size, width)) for size in sizes])
    if times is None:
        return None
    pairs = [samples * HEADS * tokens**2 for samples, tokens in sizes]
    saved = [(1 - MIN_SHARE_SAVED) * seconds["pytorch"] - seconds["products"] for seconds in times]
    min_pairs = _min_pairs(pairs, saved)
    return None if min_pairs is None else AttentionBySize(products, min_pairs)


def _runs(products: AttentionKernels, samples: int, tokens: int, width: int) -> Runs:
    """Returns both directions of an attention by each of the kernels."""
    grad, *given = (torch.empty(samples, tokens, HEADS, width).uniform_(-1, 1).transpose(1, 2) for _ in range(4))
    how = AttentionOptions(None, False, None)

    def run(kernels: AttentionKernels) -> None:
        kernels.backward((grad, *given, *kernels.forward(given, how)), how)

    return {"pytorch": lambda: run(PYTORCH_ATTENTION), "products": lambda: run(products)}


def _min_pairs(pairs: Sequence[int], saved: Sequence[float]) -> float | None:
    """Returns the pairs from which on time is saved, by a straight line through two points."""
    (few, many), (at_few, at_many) = pairs, saved
    if at_many <= 0:
        return None
    return 0.0 if at_few >= 0 else few - at_few * (many - few) / (at_many - at_few)
