"""Traces a captured graph with the fake results that Dynamo has already computed.

Operators on fake tensors with dynamic sizes are slow. Dynamo ran them to capture the graph, and keeps the results.
A checkpointed part is traced as its operators, marked for recomputation in the backward. Private to torch; checked with
torch 2.11 to 2.14.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

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

from ort_accel.recompute.checkpoint_marks import mark_recompute

if TYPE_CHECKING:
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer
    from torch.fx.node import Argument

aten = torch.ops.aten

FUNCTIONS: dict[OpOverload, set[Callable[..., object] | str]] = {
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
"""Operators that are costly on fake tensors, with the functions and methods that give the same result."""

INDEX_OPERATORS: dict[type, OpOverload] = {
    slice: aten.slice.Tensor,
    int: aten.select.int,
    type(None): aten.unsqueeze.default,
}
"""The operator for an index of each type."""


class ReusingInterpreter(fx.Interpreter):
    """Runs a captured graph under a trace, and puts results of Dynamo in place of running costly operators."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        """`mode` is that of the inputs."""
        super().__init__(module)
        self._mode = mode
        self._node: fx.Node | None = None
        self._is_cast = False
        self.checkpoint_numbers = count(1)
        self.decompositions: dict[OpOverload, Callable[..., Any]] = {
            op: partial(self._record, op) for op in (*FUNCTIONS, *INDEX_OPERATORS.values())
        }
        """To be traced with; each records its operator."""

    def run_node(self, n: fx.Node) -> Any:
        self.enter(n)
        if n.target is tag_activation_checkpoint:
            return run_checkpoint(self, n, self)
        return super().run_node(n)

    def enter(self, node: fx.Node) -> None:
        """Note the node that runs next."""
        self._node = node
        self._is_cast |= node.target is _enter_autocast and _changes_dtypes(*node.args)

    def _record(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Record an operator in the trace, with its known result; `NotImplemented` if none is known."""
        known = self._known_result(op)
        if known is None:
            return NotImplemented
        with proxy_tensor.maybe_enable_thunkify(), proxy_tensor.disable_proxy_modes_tracing() as mode:
            tracer = cast("PythonKeyTracer", mode.tracer)
            if not _are_traced(known.shape, tracer) or _is_constant((args, kwargs), tracer):
                return NotImplemented
            proxy_args, proxy_kwargs = tree_map(partial(_proxy, tracer), (args, kwargs))
            name = tracer.graph._target_to_str(op.overloadpacket.__name__)
            proxy = tracer.create_proxy("call_function", op, proxy_args, proxy_kwargs, name=name)
            result = fast_detach(self._mode, known)
            return proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=tracer)

    def _known_result(self, op: OpOverload) -> FakeTensor | None:
        """Return Dynamo's result for the present node, if that is one call of the operator."""
        assert self._node is not None
        known = self._node.meta.get("example_value")
        if self._is_cast or not _is_call(self._node, op) or type(known) is not FakeTensor:
            return None
        # A tensor that was written into may have another shape by now; one that is an argument is no new one.
        is_changed = known.is_inference() or known._version
        is_argument = any(item.meta.get("example_value") is known for item in self._node.all_input_nodes)
        return None if is_changed or is_argument else known


def run_checkpoint(interpreter: fx.Interpreter, node: fx.Node, outermost: ReusingInterpreter) -> Any:
    """Run the checkpointed part that a node of `interpreter` calls, and return its results."""
    (body, *args), _ = interpreter.fetch_args_kwargs_from_env(node)
    return _CheckpointInterpreter(body, outermost).run(*args)


class _CheckpointInterpreter(fx.Interpreter):
    """Runs the graph of a checkpointed part, and marks its nodes, while the outermost graph is traced."""

    def __init__(self, body: fx.GraphModule, outermost: ReusingInterpreter) -> None:
        super().__init__(body)
        self._outermost, self._number = outermost, next(outermost.checkpoint_numbers)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" or n.op == "call_method":
            mark_recompute(n, self._number)
            self._outermost.enter(n)
        if n.target is tag_activation_checkpoint:
            return run_checkpoint(self, n, self._outermost)
        return super().run_node(n)


def _changes_dtypes(device_type: Any, _: Argument, enabled: Argument, *__: Argument) -> bool:
    """True if autocast within a graph, which a trace records but does not apply, gives results of other types."""
    return bool(enabled) or torch.is_autocast_enabled(device_type)


def _is_call(node: fx.Node, op: OpOverload) -> bool:
    """True if a node is one call of an operator, and nothing else."""
    if node.target is not operator.getitem:
        return node.target in FUNCTIONS.get(op, ())
    index = node.args[1] if isinstance(node.args[1], tuple) else node.args[1:]
    parts = [item for item in index if item is not Ellipsis]
    return len(parts) == 1 and INDEX_OPERATORS.get(type(parts[0])) is op


def _are_traced(sizes: Iterable[int | SymInt], tracer: PythonKeyTracer) -> bool:
    """True if the trace has all sizes; these objects then stand for the nodes that it has."""
    for size in sizes:
        if isinstance(size, SymInt) and not size.node.expr.is_number:
            found = proxy_tensor.get_proxy_slot(size, tracer, None)
            if found is None:
                return False
            proxy_tensor.set_proxy_slot(size, tracer, found)
    return True


def _is_constant(arguments: Any, tracer: PythonKeyTracer) -> bool:
    """True if the trace knows the elements of all tensors, such as `torch.tensor(0.5)`, and may compute with them."""
    tensors = (item for item in tree_leaves(arguments) if isinstance(item, Tensor))
    slots = (proxy_tensor.get_proxy_slot(item, tracer, None) for item in tensors)
    return all(slot.constant is not None for slot in slots if slot is not None)


def _proxy(tracer: PythonKeyTracer, item: Any) -> object:
    """Return the trace's proxy for an argument."""
    if isinstance(item, SymInt | SymFloat):
        return proxy_tensor.fetch_sym_proxy(tracer)(item)
    return tracer.unwrap_proxy(item)
