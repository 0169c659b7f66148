"""Replaces a language model's head and the loss of its scores by one operator (`kernels/linear_cross_entropy.py`).

It runs where outputs that nobody reads have been left out, so that the loss alone reads the scores. Between head and
loss, scores may be cast, viewed as rows, multiplied with numbers and capped by a `tanh`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.amp.autocast_mode import _enter_autocast
from torch.fx.node import Argument

from ort_accel.kernels.linear_cross_entropy import MEAN, SUM, TYPES, ScoreOptions, linear_cross_entropy
from ort_accel.passes.common import changes_grad_mode, example_of, is_named, recompile, replace_steps
from ort_accel.passes.options import PassOptions

LEAST_COLUMNS = 1024
"""The columns from which on scores are larger than the hidden states by far."""

CASTS = ("float", "to", "_to_copy", "bfloat16")
PRODUCTS, QUOTIENTS = ("mul",), ("div", "truediv")
RESHAPES = ("view", "reshape", "_unsafe_view")
ROW_VIEWS = ("flatten", "contiguous", "slice", "getitem", "rows_of")
LOSSES = ("cross_entropy", "cross_entropy_loss")
STEPS = (*LOSSES, *CASTS, *PRODUCTS, *QUOTIENTS, *RESHAPES, *ROW_VIEWS, "tanh", "linear")
REDUCTIONS = {"mean": MEAN, "sum": SUM, MEAN: MEAN, SUM: SUM}


def fuse_linear_cross_entropy(graph: fx.Graph, _: PassOptions) -> int:
    """Fuse each head with its loss; returns how many."""
    heads = [head for node in graph.nodes if (head := _match(node)) is not None]
    found = [head for head in heads if not changes_grad_mode(head.loss, (*head.linear, head.target))]
    if torch.is_autocast_enabled("cpu") or any(node.target is _enter_autocast for node in graph.nodes):
        found = [head for head in found if head.dtype != torch.float32]  # the model switches autocast off for its head
    for head in found:
        dtype = example_of(head.loss).dtype
        with graph.inserting_before(head.loss):
            fused = graph.call_function(linear_cross_entropy, head.operands(graph))
            if dtype != torch.float32:
                fused = graph.call_method("to", (fused, dtype))
        replace_steps(head.loss, fused, STEPS)
    if found:
        recompile(graph)
    return len(found)


@dataclass
class _Scores:
    """The steps from a head's products to its scores, found from the loss backward."""

    before_tanh: float = 1.0
    after_tanh: float = 1.0
    is_capped: bool = False
    views: list[fx.Node] = field(default_factory=list)

    def multiply(self, factor: float) -> None:
        if self.is_capped:
            self.before_tanh *= factor
        else:
            self.after_tanh *= factor

    @property
    def soft_cap(self) -> float:
        return self.after_tanh if self.is_capped else 0.0

    @property
    def scale(self) -> float:
        """The products times this are what is capped: `cap * tanh(scale * product / cap)`."""
        return self.before_tanh * self.after_tanh


@dataclass(frozen=True)
class _Head:
    loss: fx.Node
    linear: Sequence[Argument]
    """Hidden states, weight and bias."""
    target: fx.Node
    reduction: int
    ignore_index: int
    smoothing: float
    scores: _Scores
    dtype: torch.dtype
    """The type of the products."""

    def operands(self, graph: fx.Graph) -> tuple[Argument, ...]:
        hidden, weight, bias = self.linear
        assert isinstance(hidden, fx.Node)
        width = example_of(hidden).shape[-1]
        for view in reversed(self.scores.views):
            hidden = _of_hidden(graph, view, hidden, width)
        options = ScoreOptions(self.smoothing, 0.0, self.scores.soft_cap, self.scores.scale)
        return hidden, weight, bias, self.target, self.reduction, self.ignore_index, list(options)


def _match(node: fx.Node) -> _Head | None:
    """Returns the head whose loss a node is; None for other nodes, and where others read the scores."""
    given = _loss_arguments(node)
    if given is None or given["weight"] is not None or given["reduction"] not in REDUCTIONS:
        return None
    scores, target = given["input"], given["target"]
    if not isinstance(given["ignore_index"], int) or not _are_rows_of_classes(scores, target):
        return None
    columns = example_of(scores).shape[-1]
    found = _back_to_linear(scores, columns)
    if found is None:
        return None
    linear, steps = found
    names = ("input", "weight", "bias")
    of_linear = {"bias": None} | dict(zip(names, linear.args, strict=False)) | linear.kwargs
    operands = [of_linear[name] for name in names]
    numbers = REDUCTIONS[given["reduction"]], given["ignore_index"], float(given["label_smoothing"])
    return _Head(node, operands, target, *numbers, steps, example_of(linear).dtype)


def _loss_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Returns the arguments of a cross-entropy by the names that `torch.nn.functional` gives them."""
    if not any(is_named(node, name) for name in LOSSES):
        return None
    defaults = {"weight": None, "reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0}
    if isinstance(node.target, OpOverload):
        names = ("input", *(argument.name for argument in node.target._schema.arguments[1:]))
    else:
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = defaults | dict(zip(names, node.args, strict=False)) | node.kwargs
    is_old = given.get("size_average") is not None or given.get("reduce") is not None
    return None if is_old else given


def _are_rows_of_classes(scores: object, target: object) -> bool:
    if not isinstance(scores, fx.Node) or not isinstance(target, fx.Node):
        return False
    values, labels = example_of(scores), example_of(target)
    if not isinstance(values, Tensor) or not isinstance(labels, Tensor) or values.device.type != "cpu":
        return False
    has_ranks = values.ndim == 2 and labels.ndim == 1 and labels.dtype == torch.int64
    columns = values.shape[-1] if has_ranks else 0
    return isinstance(columns, int) and columns >= LEAST_COLUMNS


def _back_to_linear(scores: fx.Node, columns: int) -> tuple[fx.Node, _Scores] | None:
    """Returns the linear layer that scores come from, and what was done to its products."""
    steps, item = _Scores(), scores
    while _has_one_reader(item) and not is_named(item, "linear"):
        if not _takes(item, columns, steps):
            return None
        item = item.all_input_nodes[0]
    value = example_of(item)
    has_type = isinstance(value, Tensor) and value.dtype in TYPES
    return (item, steps) if _has_one_reader(item) and has_type and value.shape[-1] == columns else None


def _has_one_reader(node: fx.Node) -> bool:
    return sum(map(_is_read, node.users)) == 1


def _is_read(node: fx.Node) -> bool:
    """False for an operator whose results nobody reads, such as one that serves an output that was left out."""
    is_pure = isinstance(node.target, OpOverload) and not node.target._schema.is_mutable
    return not is_pure or any(map(_is_read, node.users))


def _takes(node: fx.Node, columns: int, steps: _Scores) -> bool:
    """Adds a step to those behind it; returns whether the operator knows it."""
    value = example_of(node)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape[-1] != columns:
        return False
    if _is_any(node, CASTS):
        return True
    if (factor := _factor(node)) is not None:
        steps.multiply(factor)
        return True
    if is_named(node, "tanh") and not steps.is_capped:
        steps.is_capped = True
        return True
    if _is_any(node, RESHAPES) or (_is_any(node, ROW_VIEWS) and _keeps_columns(node, value.ndim)):
        steps.views.append(node)
        return True
    return False


def _is_any(node: fx.Node, names: Sequence[str]) -> bool:
    return any(is_named(node, name) for name in names)


def _factor(node: fx.Node) -> float | None:
    """Returns the number that a node multiplies a tensor with; None if it does something else."""
    is_product, is_quotient = _is_any(node, PRODUCTS), _is_any(node, QUOTIENTS)
    if not (is_product or is_quotient) or len(node.args) != 2 or node.kwargs:
        return None
    numbers = [item for item in node.args[0 if is_product else 1 :] if isinstance(item, int | float)]
    if len(numbers) != 1 or numbers[0] == 0:
        return None
    return float(numbers[0]) if is_product else 1 / numbers[0]


def _keeps_columns(node: fx.Node, rank: int) -> bool:
    """True if a view of rows takes no part of the last dimension."""
    if is_named(node, "slice"):
        dim = node.args[1] if len(node.args) > 1 else 0
        return isinstance(dim, int) and dim % rank != rank - 1
    if not is_named(node, "getitem"):
        return True
    index = node.args[1]
    if not isinstance(index, tuple) or not all(isinstance(item, slice) or item is Ellipsis for item in index):
        return False
    return index[-1] == slice(None) or (Ellipsis not in index and len(index) < rank)


def _of_hidden(graph: fx.Graph, view: fx.Node, hidden: fx.Node, width: int) -> fx.Node:
    """Takes a view of scores of the hidden states instead."""
    scores = view.args[0]
    copied = graph.node_copy(view, lambda item: hidden if item is scores else item)
    if _is_any(view, RESHAPES):
        sizes = copied.args[1:] or tuple(copied.kwargs.values())
        copied.kwargs = {}
        is_list = len(sizes) == 1 and isinstance(sizes[0], tuple | list)
        listed = list(sizes[0] if is_list else sizes)  # type: ignore[arg-type]
        listed[-1] = width
        copied.args = (hidden, listed) if is_list else (hidden, *listed)
    copied.meta.pop("val", None)
    copied.meta.pop("example_value", None)
    return copied
