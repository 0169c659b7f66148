"""Compiled graphs as bytes, and back, in another process of the same user.

What belongs to the process (the model's report, its sessions, Dynamo's graph) is named, not written. Nodes of graphs
are written with what a step needs of them, fake tensors as their form. The bytes are a pickle, which can run any code:
only what `SignedFiles` has accepted is ever read.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from ort_accel.graph.meta_keys import HAS_GRADIENT
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.row_skipping.pipeline import Proposal
from ort_accel.row_skipping.row_demand import Demands
from ort_accel.row_skipping.row_plan import Plan
from ort_accel.row_skipping.row_sets import Extent

META = ("val", HAS_GRADIENT)

MOST_BYTES = 1 << 20
"""The most that the constant tensors of a graph may take, each, to be written."""


class NotKeepable(Exception):
    """Why a graph cannot be kept."""


@dataclass(frozen=True)
class Form:
    """A fake tensor without its tensor."""

    shape: tuple[Extent, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)


class KeptNode:
    """A node of a graph that is not there any more: a key, and a value's form."""

    def __init__(self, name: str, meta: dict[str, Any]) -> None:
        self.name, self.meta = name, meta


@dataclass(frozen=True)
class _Place:
    """Stands for a node within its graph."""

    index: int


@dataclass
class KeptModule:
    """A graph that is made into code when it first runs."""

    nodes: Sequence[tuple[str, str, Any, Any, Any]]
    attributes: Mapping[str, Any]
    _module: fx.GraphModule | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        if self._module is None:
            self._module = self._made()
        return self._module(*inputs)

    def _made(self) -> fx.GraphModule:
        graph, made = fx.Graph(), []  # type: tuple[fx.Graph, list[fx.Node]]

        def node_at(item: Any) -> Any:
            return made[item.index] if isinstance(item, _Place) else item

        for op, name, target, args, kwargs in self.nodes:
            args, kwargs = map_aggregate(args, node_at), map_aggregate(kwargs, node_at)
            made.append(graph.create_node(op, target, args, kwargs, name))
        return fx.GraphModule(dict(self.attributes), graph)


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=5)
        self._known = {id(item): name for name, item in known.items()}

    def persistent_id(self, obj: Any) -> str | None:
        return self._known.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        """How an object is written; the usual way for what is not named here."""
        for kind, write in _WRITTEN.items():
            if isinstance(obj, kind):
                return write(obj)
        return NotImplemented


def _operator(name: str) -> Any:
    return operator.attrgetter(name)(torch.ops)


def _write_operator(obj: Any) -> Any:
    return _operator, (str(obj),)


def _write_function(obj: Any) -> Any:
    made_by = getattr(obj, "made_by", None)
    return NotImplemented if made_by is None else made_by


def _write_size(obj: torch.SymInt) -> Any:
    return expression, (expression(obj),)


def _write_fake(obj: FakeTensor) -> Any:
    return Form, (tuple(map(expression, obj.shape)), obj.dtype, obj.device)


def _write_tensor(obj: Tensor) -> Any:
    if obj.nbytes > MOST_BYTES or type(obj) is not Tensor:
        raise NotKeepable(f"a graph holds a {type(obj).__name__} of {obj.nbytes} bytes")
    return NotImplemented


def _write_node(obj: fx.Node) -> Any:
    return KeptNode, (obj.name, {key: obj.meta[key] for key in META if key in obj.meta})


def _write_module(obj: fx.GraphModule) -> Any:
    places: dict[Any, Any] = {node: _Place(index) for index, node in enumerate(obj.graph.nodes)}
    nodes = [
        (node.op, node.name, node.target, *fx.map_arg((node.args, node.kwargs), places.__getitem__))
        for node in obj.graph.nodes
    ]
    used = [node.target for node in obj.graph.nodes if node.op in ("get_attr", "call_module")]
    return KeptModule, (nodes, {name: operator.attrgetter(name)(obj) for name in used})


def _write_proposal(obj: Proposal) -> Any:
    return Proposal, (None, obj.front, obj.unread, obj.work, obj.work_of)


def _write_plan(obj: Plan) -> Any:
    return Plan, (obj.demands, obj.sets, {}, obj.runs)


def _write_demands(obj: Demands) -> Any:
    return Demands, ({}, {}, {}, obj.attentions)


_WRITTEN: dict[type, Callable[[Any], Any]] = {
    FunctionType: _write_function,
    OpOverload: _write_operator,
    OpOverloadPacket: _write_operator,
    torch.SymInt: _write_size,
    FakeTensor: _write_fake,
    Tensor: _write_tensor,
    fx.Node: _write_node,
    fx.GraphModule: _write_module,
    Proposal: _write_proposal,
    Plan: _write_plan,
    Demands: _write_demands,
}
"""What is not written as it is: operators by name, and of analyses that which the steps of a training need."""


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        return self._known[pid]


def written(obj: Any, known: Mapping[str, Any]) -> bytes:
    """An object as bytes; what is `known` is in both processes, under the same name."""
    file = io.BytesIO()
    _Writer(file, known).dump(obj)
    return file.getvalue()


def read_back(content: bytes, known: Mapping[str, Any]) -> Any:
    """The object. Only for bytes that this user's own process wrote."""
    return _Reader(io.BytesIO(content), known).load()
