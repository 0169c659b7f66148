"""A function as the graph of one segment, and as a session, for tests of what generated kernels replace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ort_accel.executor.build_model import build
from ort_accel.executor.ort_segment import Fallback, OrtSegment
from ort_accel.generated.clusters import LEAST_SAVED_BYTES, Cluster, find_clusters
from ort_accel.generated.replace import SegmentGraph
from ort_accel.graph.nodes import op_name, returned
from ort_accel.graph.symbolic_sizes import SymbolSource
from ort_accel.partition.assign import Assignment, Refusal
from ort_accel.partition.placement import place
from ort_accel.partition.segments import body_of
from ort_accel.reporting.fallbacks import Reason
from ort_accel.runtime.session import SessionSettings
from ort_accel.runtime.sessions import Sessions
from tests.executor.one_session import OPSET, all_called


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


ANY_BYTES = -(1 << 40)
"""Clusters of small tensors may read more than they save."""


def kernels_first(given: Assignment) -> Mapping[fx.Node, Refusal]:
    """Has the native library's kernels run what they can, and every other operator called as PyTorch's."""
    return dict.fromkeys(given.runner, Refusal(Reason.UNSUPPORTED_OP))


def _raise(error: Exception) -> bool:
    raise error


@dataclass
class Traced:
    """A function as a segment whose operators are calls, or first kernels of the native library: `kernels_first`."""

    function: Callable[..., Any]
    args: Sequence[Tensor]
    mode: str = "fake"
    refused: Callable[[Assignment], Mapping[fx.Node, Refusal]] = all_called
    graph: fx.Graph = field(init=False)

    def __post_init__(self) -> None:
        self.graph = make_fx(self.function, tracing_mode=self.mode)(*self.args).graph
        self.graph.eliminate_dead_code()

    @cached_property
    def segment(self) -> SegmentGraph:
        """Returns the nodes, what is wanted of them, and the calls."""
        assignment = place(self.graph, [self.refused]).with_calls()
        wanted = [node for node in returned(self.graph) if isinstance(node, fx.Node)]
        nodes = [node for node in assignment.runner if node not in assignment.free]
        return SegmentGraph(body_of(nodes, wanted, assignment.free), wanted, assignment.called)

    def clusters(self, operators: Collection[str] | None = None, least: int = LEAST_SAVED_BYTES) -> list[Cluster]:
        """Returns the clusters that save so many bytes."""
        segment = self.segment
        return find_clusters(segment.body.nodes, segment.wanted, segment.called, operators, least)

    def all_clusters(self) -> list[Cluster]:
        """Returns the clusters, however little they save."""
        return self.clusters(least=ANY_BYTES)

    def operators(self, operators: Collection[str] | None = None) -> list[list[str]]:
        """Returns the names of each cluster's operators, without namespace and overload."""
        return [[op_name(node).split(".")[1] for node in each.nodes] for each in self.clusters(operators)]

    def session(self, segment: SegmentGraph | None = None) -> Session:
        """Returns the session of a segment that came of this one."""
        return Session(self, segment or self.segment)


class Arguments:
    """Arranges the arguments of a traced function as the inputs of its segment."""

    def __init__(self, traced: Traced, inputs: Sequence[fx.Node]) -> None:
        given = traced.graph.find_nodes(op="placeholder")
        named = {node.name: position for position, node in enumerate(given)}
        self._positions = [named[node.name] for node in inputs]
        self._symbols = SymbolSource()
        for position, node in enumerate(given):
            self._symbols.learn(position, node.meta["val"])

    def __call__(self, *args: Tensor) -> tuple[list[Tensor], dict[str, int]]:
        """Returns the inputs, and the values of the symbols."""
        symbols: dict[str, int] = {}
        self._symbols.read(args, symbols)
        return [args[position] for position in self._positions], symbols


class Session:
    """A segment of a traced function, which is called as the function is."""

    def __init__(self, traced: Traced, segment: SegmentGraph) -> None:
        model = build(segment.body, segment.wanted, OPSET, segment.called)
        self.operators = [
            node.attributes["name"].as_string() if node.op_type == "KernelCall" else node.op_type
            for node in model.model.graph
        ]
        fallback = Fallback(lambda *_: pytest.fail("it ran in PyTorch"), _raise)
        self._run = OrtSegment(model, Sessions(SessionSettings(threads=2)), lambda _: False, fallback, "test")
        self._arguments = Arguments(traced, model.given)

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        return self._run(*self._arguments(*args))
