"""Rules that give single nodes to PyTorch, and the assignment that the decisions of `placement.py` fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_accel.graph.nodes import (
    CHECKS,
    fakes_in,
    is_data_dependent,
    is_getitem,
    is_random,
    is_view,
    is_watch_call,
    op_name,
    writes,
)
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.kernels import linear_token_scores, token_log_probs
from ort_accel.kernels.bit_mask import is_bit_mask_op
from ort_accel.kernels.host_copies import is_host_copy
from ort_accel.kernels.kernel_call import Calls, kernel_for
from ort_accel.lowering.aten_call import FLOAT_OF_SIZES, needs_copy, reads_float_of_sizes, why_not_callable
from ort_accel.lowering.onnx_graph import DTYPES, HALF_DTYPES, NotLowerable, OnnxGraph, Operand, Slower, describe
from ort_accel.lowering.registry import lower, lowerings
from ort_accel.operators.facts import facts
from ort_accel.partition.known_slow_ops import slower
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.segments import Runner
from ort_accel.runtime.crash_journal import CrashedBefore
from ort_accel.runtime.sessions import Sessions

aten = torch.ops.aten

FOR_SPEED = (Reason.SLOWER, Reason.NEIGHBOUR)
"""The estimator's reasons, which stand for nodes that ONNX Runtime can run."""


_WHOLE_STEPS = {
    token_log_probs.token_scores,
    token_log_probs.token_scores_backward,
    linear_token_scores.own.linear_token_scores.default,
    linear_token_scores.own.linear_token_scores_backward.default,
}
"""Operators that only PyTorch has as one step."""


@dataclass(frozen=True)
class Refusal:
    """The reason why PyTorch runs a node."""

    reason: Reason
    detail: str = ""


@dataclass
class Assignment:
    """The runner of each node of a graph, and why PyTorch runs the nodes that it runs."""

    runner: dict[fx.Node, Runner]
    refusals: dict[fx.Node, Refusal] = field(default_factory=dict)
    called: Calls = field(default_factory=dict)
    """Nodes of ONNX Runtime's sessions that call a kernel of the native library, or else PyTorch's operator.

    For a view that ONNX Runtime cannot take, it means that ONNX Runtime's own operators read a copy of it.
    """
    has_calls: bool = False
    """True if sessions may call kernels, so that one session runs what it can of a whole graph."""

    @cached_property
    def free(self) -> set[fx.Node]:
        """Views that both runtimes can take. They belong to no segment: each segment repeats those that it needs."""
        views = {node for node, runner in self.runner.items() if runner is Runner.ORT and is_view(node)}
        return views | {user for view in views for user in view.users if is_getitem(user)}

    @property
    def undecided(self) -> list[fx.Node]:
        """Nodes that ONNX Runtime runs unless a later decision gives them to PyTorch."""
        return [node for node, runner in self.runner.items() if runner is Runner.ORT and node not in self.free]

    def is_called(self, node: fx.Node) -> bool:
        """True if a session calls PyTorch's operator for a node that ONNX Runtime's kernels do not compute."""
        return self.runner[node] is Runner.ORT and node in self.refusals

    def with_refusals(self, refusals: Mapping[fx.Node, Refusal]) -> Assignment:
        """Returns the assignment in which PyTorch runs these nodes, too."""
        runner = self.runner | dict.fromkeys(refusals, Runner.PYTORCH)
        return replace(self, runner=runner, refusals={**self.refusals, **refusals})

    def leave_to_pytorch(self, nodes: Iterable[fx.Node], refusal: Refusal) -> None:
        """Give PyTorch nodes whose session could not be made."""
        self.runner.update(dict.fromkeys(nodes, Runner.PYTORCH))
        self.refusals.update(dict.fromkeys(nodes, refusal))

    def with_calls(self) -> Assignment:
        """Returns the assignment of a whole graph to sessions, which call kernels wherever they can.

        The native library's kernels come first. PyTorch's operators follow where ONNX Runtime lacks a kernel or runs
        slower. If an operator makes its results itself, a copy of them takes longer than what its speed saves.
        """
        kernels = {node: kernel for node in self.runner if self._may_change(node) and (kernel := kernel_for(node))}
        refused = [node for node in self.runner if self.runner[node] is Runner.PYTORCH and node not in kernels]
        moved = [node for node in refused if not why_not_callable(node)]
        own = {node for node in moved if self._keeps_own_kernel(node)}
        refusals = {node: refusal for node, refusal in self.refusals.items() if node not in own and node not in kernels}
        called = dict.fromkeys(node for node in moved if node not in own)
        runner = self.runner | dict.fromkeys([*moved, *kernels], Runner.ORT)
        return Assignment(runner, refusals, called | kernels, has_calls=True)

    def _may_change(self, node: fx.Node) -> bool:
        """True unless the user, or a failure, has given a node to PyTorch."""
        return node not in self.refusals or self.refusals[node].reason not in (Reason.WISH, Reason.ENDED_RUNS)

    def _keeps_own_kernel(self, node: fx.Node) -> bool:
        """True for a node refused for speed that is a view, or whose results a call would copy.

        Other nodes in halves are calls.
        """
        if node not in self.refusals or self.refusals[node].reason not in FOR_SPEED:
            return False
        in_half = any(tensor.dtype in HALF_DTYPES for tensor in fakes_in(node.meta["val"]))
        return is_view(node) or (not in_half and needs_copy(node))


def operands(node: fx.Node, make: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
    """Returns the node's arguments for a lowering: tensors made by `make`, sizes as they are."""

    def convert(argument: fx.Node) -> Any:
        value = argument.meta.get("val")
        return make(argument) if isinstance(value, torch.Tensor) else value

    return fx.map_arg(node.args, convert), fx.map_arg(node.kwargs, convert)


@dataclass
class NodeRules:
    """Applies the rules for single nodes. A trial model is built once for each operator, dtype and shape."""

    opset: int
    sessions: Sessions
    unwanted: frozenset[str] = frozenset()
    for_speed: bool = True
    """Give PyTorch the operators that are known to be slow in ONNX Runtime."""
    estimated: Callable[[fx.Node], bool] = lambda _: False
    """True for a node whose time will be estimated; the list of slow operators does not apply to it."""
    _tried: dict[tuple[object, ...], Refusal | None] = field(default_factory=dict)

    def refusal(self, node: fx.Node) -> Refusal | None:
        """Returns why PyTorch must run this node; None if ONNX Runtime can."""
        rules = (_not_an_operator, self._by_design, self._unsupported, self._known_slow, self._trial)
        return next(filter(None, (rule(node) for rule in rules)), None)

    def _by_design(self, node: fx.Node) -> Refusal | None:
        """Refuses what PyTorch runs whatever ONNX Runtime can do."""
        name = op_name(node)
        if {name, name.rpartition(".")[0]} & self.unwanted or is_watch_call(node):
            return Refusal(Reason.WISH)
        if is_host_copy(node):
            return Refusal(Reason.WISH, "memory.offload")
        if "scaled_dot_product" in name or "flash_attention" in name:
            return Refusal(Reason.ATTENTION)
        if node.target in _WHOLE_STEPS or is_bit_mask_op(node):
            return Refusal(Reason.ONE_STEP)
        if is_random(node):
            return Refusal(Reason.RANDOM)
        if facts(node).is_uninitialized and all(map(is_random, node.users)):
            return Refusal(Reason.RANDOM, "memory to draw into")
        return None

    def _unsupported(self, node: fx.Node) -> Refusal | None:
        """Refuses operators without a lowering, and tensors that ONNX Runtime cannot take."""
        if writes(node):
            return Refusal(Reason.MUTATION)
        if node.target not in lowerings():
            return Refusal(Reason.UNSUPPORTED_OP)
        if reads_float_of_sizes(node):
            return Refusal(Reason.UNSUPPORTED_OP, FLOAT_OF_SIZES)
        results = fakes_in(node.meta["val"])
        for tensor in fakes_in([argument.meta.get("val") for argument in node.all_input_nodes]) + results:
            if tensor.dtype not in DTYPES:
                return Refusal(Reason.UNSUPPORTED_DTYPE, str(tensor.dtype))
            if tensor.device.type != self.sessions.settings.place.kind:
                return Refusal(Reason.ELSEWHERE, f"a tensor on {tensor.device}")
        if any(0 in map(expression, tensor.shape) for tensor in results):
            return Refusal(Reason.SMALL, "an empty tensor, for which some kernels give no result")
        return None

    def _known_slow(self, node: fx.Node) -> Refusal | None:
        if not self.for_speed or self.sessions.settings.place.is_cuda or self.estimated(node):
            return None
        figures = slower(node)
        return Refusal(Reason.SLOWER_ELSEWHERE, figures) if figures else None

    def _trial(self, node: fx.Node) -> Refusal | None:
        """Refuses a node whose model of one operator ONNX Runtime cannot load."""
        key = (node.target, str(operands(node, lambda item: _kind(item.meta["val"]))), str(_kind(node.meta["val"])))
        if key not in self._tried:
            self._tried[key] = self._try(node)
        return self._tried[key]

    def _try(self, node: fx.Node) -> Refusal | None:
        try:
            model = self._model_of(node)
            self.sessions.try_out(ir.to_proto(model).SerializeToString(), f"{op_name(node)} by itself")
        except Slower as error:
            return Refusal(Reason.SLOWER_ELSEWHERE, str(error))
        except NotLowerable as error:
            return Refusal(Reason.UNSUPPORTED_OP, str(error))
        except CrashedBefore as error:
            return Refusal(Reason.ENDED_RUNS, str(error))
        except Exception as error:
            return Refusal(Reason.UNSUPPORTED_DTYPE, short_message(error))
        return None

    def _model_of(self, node: fx.Node) -> ir.Model:
        """Builds a model of this node alone."""
        graph = OnnxGraph(self.opset)
        inputs: dict[fx.Node, Operand] = {}

        def make(argument: fx.Node) -> Operand:
            if argument not in inputs:
                inputs[argument] = graph.input(f"input_{len(inputs)}", argument.meta["val"])
            return inputs[argument]

        args, kwargs = operands(node, make)
        results = lower(graph, node.target, args, kwargs, node.meta["val"])
        fakes = value if isinstance(value := node.meta["val"], tuple | list) else [value]
        computed = [(result, fake) for result, fake in zip(results, fakes, strict=True) if result is not None]
        outputs = [graph.op("Identity", result) for result, _ in computed]
        for output, (_, fake) in zip(outputs, computed, strict=True):
            describe(output, fake)  # ONNX Runtime then refuses a kernel whose result has another dtype than PyTorch's
        return graph.model(outputs, "trial")


def _not_an_operator(node: fx.Node) -> Refusal | None:
    if is_data_dependent(node):
        return Refusal(Reason.CHECK if node.target in CHECKS else Reason.DATA_DEPENDENT)
    if not isinstance(node.target, torch._ops.OpOverload):
        return Refusal(Reason.UNSUPPORTED_OP, "not an ATen operator")
    return None


def _kind(value: object) -> object:
    """Returns what a lowering may decide by: the dtypes, and the sizes that are fixed."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(size if isinstance(size, int) else "n" for size in value.shape))
    return tuple(map(_kind, value)) if isinstance(value, tuple | list) else value


def short_message(error: Exception) -> str:
    """Returns an error's message in one line."""
    text = str(error)
    marker = "Could not find an implementation for "
    if marker in text:
        return "no kernel for " + text.split(marker)[1].split(" node")[0]
    return text.splitlines()[0][:200] if text else type(error).__name__
