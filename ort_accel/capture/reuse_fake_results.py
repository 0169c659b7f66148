"""Traces a captured graph with the results that Dynamo has already computed.

What an operator gives on fake tensors with open sizes takes milliseconds to compute: attention 60 of them. Dynamo did
so to capture the graph, and keeps the results. It uses what is private to torch; checked with torch 2.11 to 2.13.

A checkpointed part is traced as what is in it, marked as what the backward computes again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor, fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import OpOverload
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast
from torch.fx.experimental import proxy_tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from ort_accel.recompute.checkpoint_marks import mark

aten = torch.ops.aten

CALLS: dict[OpOverload, set[Any]] = {
    aten.add.Tensor: {operator.add, torch.add, "add"},
    aten.__and__.Tensor: {operator.and_},
    aten.cat.default: {torch.cat},
    aten.contiguous.default: {"contiguous"},
    aten.cross_entropy_loss.default: {functional.cross_entropy},
    aten.dropout.default: {functional.dropout},
    aten.embedding.default: {functional.embedding},
    aten.expand.default: {"expand"},
    aten.gelu.default: {functional.gelu},
    aten.layer_norm.default: {functional.layer_norm},
    aten.linear.default: {functional.linear},
    aten.matmul.default: {operator.matmul, torch.matmul, "matmul"},
    aten.mean.dim: {torch.mean, "mean"},
    aten.mul.Tensor: {operator.mul, torch.mul, "mul"},
    aten.permute.default: {torch.permute, "permute"},
    aten.pow.Tensor_Scalar: {operator.pow, torch.pow, "pow"},
    aten.reshape.default: {torch.reshape, "reshape"},
    aten.rsqrt.default: {torch.rsqrt, "rsqrt"},
    aten.scaled_dot_product_attention.default: {functional.scaled_dot_product_attention},
    aten.silu.default: {functional.silu},
    aten.softmax.int: {functional.softmax, torch.softmax, "softmax"},
    aten.transpose.int: {torch.transpose, "transpose"},
    aten.unsqueeze.default: {torch.unsqueeze, "unsqueeze"},
    aten.view.default: {"view"},
    aten.where.self: {torch.where},
}
"""Operators that cost much, with the functions and methods whose result is the operator's."""

PARTS: dict[type, OpOverload] = {slice: aten.slice.Tensor, int: aten.select.int, type(None): aten.unsqueeze.default}
"""The operator that an index of each kind stands for."""


class KnownResults(fx.Interpreter):
    """Runs a captured graph while it is traced; `table` is the table of decompositions to trace it with."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        """`mode` is that of the inputs."""
        super().__init__(module)
        self._mode = mode
        self._node: fx.Node | None = None
        self._is_cast = False
        self.regions = count(1)
        """Numbers for checkpointed parts."""
        self.table: dict[OpOverload, Callable[..., Any]] = {
            op: partial(self._record, op) for op in (*CALLS, *PARTS.values())
        }

    def run_node(self, n: fx.Node) -> Any:
        self.note(n)
        if n.target is tag_activation_checkpoint:
            return run_again(self, n, self)
        return super().run_node(n)

    def note(self, node: fx.Node) -> None:
        """Learn which node is run next."""
        self._node = node
        self._is_cast |= node.target is _enter_autocast and _changes_types(*node.args)

    def _record(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Write an operator into the trace, with the result that is known; `NotImplemented` where none is."""
        known = self._known(op)
        if known is None:
            return NotImplemented
        with proxy_tensor.maybe_enable_thunkify(), proxy_tensor.disable_proxy_modes_tracing() as mode:
            tracer: Any = mode.tracer
            if not _is_traced(known.shape, tracer) or _is_constant((args, kwargs), tracer):
                return NotImplemented
            given, named = tree_map(partial(_proxy, tracer), (args, kwargs))
            name = tracer.graph._target_to_str(op.overloadpacket.__name__)
            proxy = tracer.create_proxy("call_function", op, given, named, name=name)
            result = fast_detach(self._mode, known)
            return proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=tracer)

    def _known(self, op: OpOverload) -> FakeTensor | None:
        """What Dynamo computed for the node at hand, if that is one call of the operator."""
        assert self._node is not None
        known = self._node.meta.get("example_value")
        if self._is_cast or not _is_call(self._node, op) or type(known) is not FakeTensor:
            return None
        # A tensor that was written into may have another shape by now; one that is an argument is no new one.
        is_changed = known.is_inference() or known._version
        is_given = any(item.meta.get("example_value") is known for item in self._node.all_input_nodes)
        return None if is_changed or is_given else known


def run_again(reader: fx.Interpreter, node: fx.Node, around: KnownResults) -> Any:
    """What a checkpointed part gives, which `node` calls."""
    (body, *args), _ = reader.fetch_args_kwargs_from_env(node)
    return _Again(body, around).run(*args)


class _Again(fx.Interpreter):
    """Runs the graph of a checkpointed part while the one around it is traced."""

    def __init__(self, body: fx.GraphModule, around: KnownResults) -> None:
        super().__init__(body)
        self._around, self._region = around, next(around.regions)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" or n.op == "call_method":
            mark(n, self._region)
            self._around.note(n)
        if n.target is tag_activation_checkpoint:
            return run_again(self, n, self._around)
        return super().run_node(n)


def _changes_types(kind: Any, _: Any, enabled: Any, *__: Any) -> bool:
    """Whether autocast within a graph, which a trace writes down without obeying it, gives results of other types."""
    return bool(enabled) or torch.is_autocast_enabled(kind)


def _is_call(node: fx.Node, op: OpOverload) -> bool:
    """Whether a node is one call of an operator, and nothing else."""
    if node.target is not operator.getitem:
        return node.target in CALLS.get(op, ())
    index = node.args[1] if isinstance(node.args[1], tuple) else node.args[1:]
    parts = [item for item in index if item is not Ellipsis]
    return len(parts) == 1 and PARTS.get(type(parts[0])) is op


def _is_traced(sizes: Iterable[int | SymInt], tracer: Any) -> bool:
    """Whether the trace has all sizes already; these are then taken for what they are in the trace."""
    for size in sizes:
        if isinstance(size, SymInt) and not size.node.expr.is_number:
            found = proxy_tensor.get_proxy_slot(size, tracer, None)
            if found is None:
                return False
            proxy_tensor.set_proxy_slot(size, tracer, found)
    return True


def _is_constant(arguments: Any, tracer: Any) -> bool:
    """Whether the trace knows the elements of all tensors, such as `torch.tensor(0.5)`, and may compute with them."""
    tensors = (item for item in tree_leaves(arguments) if isinstance(item, Tensor))
    slots = (proxy_tensor.get_proxy_slot(item, tracer, None) for item in tensors)
    return all(slot.constant is not None for slot in slots if slot is not None)


def _proxy(tracer: Any, item: Any) -> Any:
    """What stands for an argument in the trace."""
    if isinstance(item, SymInt | SymFloat):
        return proxy_tensor.fetch_sym_proxy(tracer)(item)
    return tracer.unwrap_proxy(item)
