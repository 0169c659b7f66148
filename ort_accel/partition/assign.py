"""Which nodes ONNX Runtime runs, and why it does not run the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from ort_accel.graph.nodes import CHECKS, depends_on_data, fakes_in, is_random, is_watched, op_name, writes
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.kernels.bit_mask import is_of_bits
from ort_accel.kernels.host_copies import is_move
from ort_accel.kernels.token_log_probs import token_scores, token_scores_backward
from ort_accel.lowering.onnx_graph import DTYPES, NotLowerable, OnnxGraph, Operand, Slower, describe
from ort_accel.lowering.registry import lower, lowerings
from ort_accel.operators.facts import facts
from ort_accel.partition.known_slow_ops import slower
from ort_accel.reporting import Reason
from ort_accel.runtime.crash_journal import EndedBefore
from ort_accel.runtime.sessions import Sessions

aten = torch.ops.aten


@dataclass(frozen=True)
class Refusal:
    """Why PyTorch runs a node."""

    reason: Reason
    detail: str = ""


def operands(node: fx.Node, make: Any) -> tuple[Any, Any]:
    """The node's arguments for a lowering: tensors made by `make`, sizes as they are."""

    def convert(argument: fx.Node) -> Any:
        value = argument.meta.get("val")
        return make(argument) if isinstance(value, torch.Tensor) else value

    return fx.map_arg(node.args, convert), fx.map_arg(node.kwargs, convert)


@dataclass
class Assigner:
    """Decides node by node, trying each kind of node once in a model of its own."""

    opset: int
    sessions: Sessions
    unwanted: frozenset[str] = frozenset()
    for_speed: bool = True
    """Leave to PyTorch what it runs faster."""
    estimated: Callable[[fx.Node], bool] = lambda _: False
    """Whether a node's time will be estimated, so that known figures do not count."""
    _tried: dict[Any, Refusal | None] = field(default_factory=dict)

    def refusal(self, node: fx.Node) -> Refusal | None:
        """Why PyTorch must run this node; None if ONNX Runtime can."""
        target = node.target
        if depends_on_data(node):
            return Refusal(Reason.CHECK if target in CHECKS else Reason.DATA_DEPENDENT)
        if not isinstance(target, torch._ops.OpOverload):
            return Refusal(Reason.UNSUPPORTED_OP, "not an ATen operator")
        if by_design := self._by_design(node, target):
            return by_design
        if writes(node):
            return Refusal(Reason.MUTATION)
        if target not in lowerings():
            return Refusal(Reason.UNSUPPORTED_OP)
        if refusal := self._refused_tensor(node):
            return refusal
        if any(0 in map(expression, tensor.shape) for tensor in fakes_in(node.meta["val"])):
            return Refusal(Reason.SMALL, "an empty tensor, for which some kernels give no result")
        figures = self._figures(node)
        return Refusal(Reason.SLOWER_ELSEWHERE, figures) if figures else self._trial(node)

    def _by_design(self, node: fx.Node, target: torch._ops.OpOverload[..., Any]) -> Refusal | None:
        """Why a node is PyTorch's, whatever ONNX Runtime can do."""
        if {str(target), str(target).rpartition(".")[0]} & self.unwanted or is_watched(node):
            return Refusal(Reason.WISH)
        if is_move(node):
            return Refusal(Reason.WISH, "memory.offload")
        if "scaled_dot_product" in str(target) or "flash_attention" in str(target):
            return Refusal(Reason.ATTENTION)
        if target in (token_scores, token_scores_backward) or is_of_bits(node):
            return Refusal(Reason.ONE_STEP)
        if is_random(node):
            return Refusal(Reason.RANDOM)
        if facts(node).is_uninitialized and all(map(is_random, node.users)):
            return Refusal(Reason.RANDOM, "memory to draw into")
        return None

    def _figures(self, node: fx.Node) -> str | None:
        if not self.for_speed or self.sessions.settings.place.is_cuda:
            return None
        return None if self.estimated(node) else slower(node)

    def _refused_tensor(self, node: fx.Node) -> Refusal | None:
        inputs = [argument.meta.get("val") for argument in node.all_input_nodes]
        for tensor in fakes_in(inputs) + fakes_in(node.meta["val"]):
            if tensor.dtype not in DTYPES:
                return Refusal(Reason.UNSUPPORTED_DTYPE, str(tensor.dtype))
            if tensor.device.type != self.sessions.settings.place.kind:
                return Refusal(Reason.ELSEWHERE, f"a tensor on {tensor.device}")
        return None

    def _trial(self, node: fx.Node) -> Refusal | None:
        key = (node.target, str(operands(node, lambda item: _kind(item.meta["val"]))), str(_kinds(node.meta["val"])))
        if key not in self._tried:
            self._tried[key] = self._try(node)
        return self._tried[key]

    def _try(self, node: fx.Node) -> Refusal | None:
        graph = OnnxGraph(self.opset)
        made: dict[fx.Node, Operand] = {}

        def make(argument: fx.Node) -> Operand:
            if argument not in made:
                made[argument] = graph.input(f"input_{len(made)}", argument.meta["val"])
            return made[argument]

        try:
            args, kwargs = operands(node, make)
            results = lower(graph, node.target, args, kwargs, node.meta["val"])
            promised = fakes if isinstance(fakes := node.meta["val"], tuple | list) else [fakes]
            made_values = [(value, fake) for value, fake in zip(results, promised, strict=True) if value is not None]
            outputs = [graph.op("Identity", value) for value, _ in made_values]
            for output, (_, fake) in zip(outputs, made_values, strict=True):
                describe(output, fake)  # a kernel whose result has another type than PyTorch's is refused
            model = ir.to_proto(graph.model(outputs, "trial")).SerializeToString()
            self.sessions.try_out(model, f"{op_name(node)} by itself")
        except Slower as error:
            return Refusal(Reason.SLOWER_ELSEWHERE, str(error))
        except NotLowerable as error:
            return Refusal(Reason.UNSUPPORTED_OP, str(error))
        except EndedBefore as error:
            return Refusal(Reason.ENDED_RUNS, str(error))
        except Exception as error:
            return Refusal(Reason.UNSUPPORTED_DTYPE, short(error))
        return None


def _kind(fake: Any) -> Any:
    """What a lowering may decide by: the type, and the sizes that are fixed."""
    if not isinstance(fake, torch.Tensor):
        return fake
    return (fake.dtype, tuple(size if isinstance(size, int) else "n" for size in fake.shape))


def _kinds(value: Any) -> Any:
    return tuple(map(_kind, value)) if isinstance(value, tuple | list) else _kind(value)


def short(error: Exception) -> str:
    """What an error says, in one line."""
    text = str(error)
    marker = "Could not find an implementation for "
    if marker in text:
        return "no kernel for " + text.split(marker)[1].split(" node")[0]
    return text.splitlines()[0][:200] if text else type(error).__name__
