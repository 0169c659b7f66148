"""Pickles compiled graphs, for another process of the same user.

Objects of the process (the model's report, its sessions, Dynamo's graph) are pickled as names. Nodes are pickled with
the meta that steps need, fake tensors as their sizes and types. A pickle can run any code: only files that
`SignedFiles` has accepted are loaded.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from ort_accel.graph.meta_keys import HAS_GRADIENT
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.row_skipping.pipeline import Proposal
from ort_accel.row_skipping.row_demand import RowAnalysis
from ort_accel.row_skipping.row_plan import RowPlan
from ort_accel.row_skipping.row_sets import SizeExpression

Reduced = Any
"""A result of `__reduce__`: a function and its arguments, or `NotImplemented`."""

NodeParts = tuple[str, str, Any, Any, Any]
"""The operation, name, target, arguments and keyword arguments of a node."""

META_KEYS = ("val", HAS_GRADIENT)

MOST_BYTES = 1 << 20
"""The most that a constant tensor of a graph may take."""


class NotKeepable(Exception):
    """A graph cannot be kept; the text says why."""


@dataclass(frozen=True)
class StoredFakeTensor:
    """The sizes and type of a fake tensor."""

    shape: tuple[SizeExpression, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Return the number of its dimensions."""
        return len(self.shape)


class StoredNode:
    """A node whose graph is not stored: an object to look up by, and its meta."""

    def __init__(self, name: str, meta: dict[str, object]) -> None:
        self.name, self.meta = name, meta


@dataclass(frozen=True)
class _NodeIndex:
    """Stands for a node within its graph."""

    index: int


@dataclass
class StoredModule:
    """A graph module that is built when it first runs."""

    nodes: Sequence[NodeParts]
    attributes: Mapping[str, object]
    _module: fx.GraphModule | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the module."""
        if self._module is None:
            self._module = self._build()
        return self._module(*inputs)

    def _build(self) -> fx.GraphModule:
        graph = fx.Graph()
        built: list[fx.Node] = []

        def node_at(item: Any) -> Any:
            return built[item.index] if isinstance(item, _NodeIndex) else item

        for op, name, target, args, kwargs in self.nodes:
            args, kwargs = map_aggregate(args, node_at), map_aggregate(kwargs, node_at)
            built.append(graph.create_node(op, target, args, kwargs, name))
        return fx.GraphModule(dict(self.attributes), graph)


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, object]) -> None:
        super().__init__(file, protocol=5)
        self._known = {id(item): name for name, item in known.items()}

    def persistent_id(self, obj: object) -> str | None:
        return self._known.get(id(obj))

    def reducer_override(self, obj: object) -> Any:
        """Return how an object is pickled; `NotImplemented` for the usual way."""
        for kind, reduce in _REDUCERS.items():
            if isinstance(obj, kind):
                return reduce(obj)
        return NotImplemented


def _operator(name: str) -> Any:
    return operator.attrgetter(name)(torch.ops)


def _reduce_tensor(obj: Tensor) -> Reduced:
    if obj.nbytes > MOST_BYTES or type(obj) is not Tensor:
        raise NotKeepable(f"a graph holds a {type(obj).__name__} of {obj.nbytes} bytes")
    return NotImplemented


def _onnx_value(name: str | None) -> ir.Value:
    return ir.Value(name=name)


def _reduce_onnx_value(obj: ir.Value) -> Reduced:
    """Leave out the graph of a value: it is not needed, and pickling its chain of nodes would recurse too deeply."""
    return _onnx_value, (obj.name,)


def _reduce_proposal(obj: Proposal) -> Reduced:
    """Leaves out the graph, which is not read once the smaller one was made."""
    first, *others = fields(obj)
    assert first.name == "traced"
    return Proposal, (None, *(getattr(obj, item.name) for item in others))


def _reduce_module(obj: fx.GraphModule) -> Reduced:
    indices: dict[Any, Any] = {node: _NodeIndex(index) for index, node in enumerate(obj.graph.nodes)}
    nodes = [
        (node.op, node.name, node.target, *fx.map_arg((node.args, node.kwargs), indices.__getitem__))
        for node in obj.graph.nodes
    ]
    used = [node.target for node in obj.graph.nodes if node.op in ("get_attr", "call_module")]
    return StoredModule, (nodes, {name: operator.attrgetter(name)(obj) for name in used})


_REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    FunctionType: lambda obj: getattr(obj, "made_by", NotImplemented),
    OpOverload: lambda obj: (_operator, (str(obj),)),
    OpOverloadPacket: lambda obj: (_operator, (str(obj),)),
    torch.SymInt: lambda obj: (expression, (expression(obj),)),
    FakeTensor: lambda obj: (StoredFakeTensor, (tuple(map(expression, obj.shape)), obj.dtype, obj.device)),
    Tensor: _reduce_tensor,
    ir.Value: _reduce_onnx_value,
    fx.Node: lambda obj: (StoredNode, (obj.name, {key: obj.meta[key] for key in META_KEYS if key in obj.meta})),
    fx.GraphModule: _reduce_module,
    Proposal: _reduce_proposal,
    RowPlan: lambda obj: (RowPlan, (obj.demands, obj.sets, {}, obj.runs)),
    RowAnalysis: lambda obj: (RowAnalysis, ({}, {}, {}, obj.attentions)),
}
"""Types with a way of their own: operators are pickled by name, analyses without what training steps do not need."""


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: str) -> object:
        return self._known[pid]


def dumped(obj: object, known: Mapping[str, object]) -> bytes:
    """Return an object as bytes; the `known` objects are in both processes, under the same names."""
    file = io.BytesIO()
    _Writer(file, known).dump(obj)
    return file.getvalue()


def loaded(content: bytes, known: Mapping[str, object]) -> object:
    """Return the object of bytes that a process of this user wrote; others can run any code."""
    return _Reader(io.BytesIO(content), known).load()
