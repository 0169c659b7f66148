"""A function as one session, for tests of what a session calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.executor.build_model import build
from ort_accel.executor.ort_segment import Fallback, OrtSegment
from ort_accel.graph.nodes import returned
from ort_accel.graph.symbolic_sizes import SymbolSource
from ort_accel.partition.assign import Assignment, Refusal
from ort_accel.partition.placement import place
from ort_accel.partition.segments import body_of
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.segments import Runner
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions

OPSET = 17


def _raise(error: Exception) -> bool:
    raise error


def all_called(given: Assignment) -> Mapping[fx.Node, Refusal]:
    """Has every operator called as PyTorch's."""
    return dict.fromkeys(given.runner, Refusal(Reason.WISH))


class Compiled:
    """A function as one session. Without refusals, the native library's kernels run what they can."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Tensor],
        mode: str = "fake",
        refused: Callable[[Assignment], Mapping[fx.Node, Refusal]] = all_called,
    ) -> None:
        graph = make_fx(function, tracing_mode=mode)(*args).graph
        graph.eliminate_dead_code()
        self.assignment = place(graph, [refused]).with_calls()
        assert Runner.PYTORCH not in self.assignment.runner.values()
        self.wanted = [node for node in returned(graph) if isinstance(node, fx.Node)]
        nodes = [node for node in self.assignment.runner if node not in self.assignment.free]
        self.model = build(
            body_of(nodes, self.wanted, self.assignment.free), self.wanted, OPSET, self.assignment.called
        )
        fallback = Fallback(lambda *_: pytest.fail("it ran in PyTorch"), _raise)
        self.segment = OrtSegment(
            self.model, Sessions(SessionSettings(threads=2)), lambda _: False, fallback, "test", frees_inputs=True
        )
        self._given = graph.find_nodes(op="placeholder")
        self._symbols = SymbolSource()
        for position, node in enumerate(self._given):
            self._symbols.learn(position, node.meta["val"])

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        symbols: dict[str, int] = {}
        self._symbols.read(args, symbols)
        by_node = dict(zip(self._given, args, strict=True))
        return self.segment([by_node[node] for node in self.segment.inputs], symbols)

    @property
    def operators(self) -> list[str]:
        return [node.op_type for node in self.model.model.graph]
