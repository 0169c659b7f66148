"""Groups nodes that take the same time, and runs one of each group on either side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import fx

from ort_accel.autotune.synthetic_inputs import synthetic_inputs, synthetic_value
from ort_accel.autotune.timer import Runs
from ort_accel.executor.build_model import build
from ort_accel.executor.ort_segment import Fallback, OrtSegment
from ort_accel.executor.program import Symbols
from ort_accel.executor.torch_segment import PyTorchSegment
from ort_accel.graph.nodes import fakes_in, op_name, output_nodes_of
from ort_accel.graph.symbolic_sizes import hint, hinted_elements
from ort_accel.partition.assign import Assignment
from ort_accel.partition.segments import Body, body_of
from ort_accel.reporting.segments import Runner
from ort_accel.runtime.sessions import Sessions


@dataclass(frozen=True)
class Kind:
    """Nodes with the same operator, constants, sizes, dtypes and layouts."""

    subject: str
    key: str
    nodes: list[fx.Node]
    free: set[fx.Node]

    def runs(self, owner: fx.GraphModule, opset: int, sessions: Sessions, symbols: Symbols) -> Runs:
        """Returns runs of one of the nodes as a segment on either side, with synthetic inputs."""
        body, wanted = _alone(self.nodes[0], self.free)
        by_pytorch = PyTorchSegment(body, wanted, owner, dead_inputs=())
        by_ort = OrtSegment(
            build(body, wanted, opset), sessions, lambda _: False, Fallback(by_pytorch, _fail), self.subject
        )
        inputs = synthetic_inputs(by_ort.inputs)
        return {
            Runner.ORT.value: lambda: by_ort(list(inputs), symbols),
            Runner.PYTORCH.value: lambda: by_pytorch(list(inputs), symbols),
        }


def kinds_in(assignment: Assignment) -> list[Kind]:
    """Returns the kinds of the nodes that are undecided, in order of the elements that they move in all."""
    kinds: dict[str, Kind] = {}
    for node in filter(_gives_tensors, assignment.undecided):
        kind = kind_of(node, assignment.free)
        kinds.setdefault(kind.key, kind).nodes.append(node)
    return sorted(kinds.values(), key=lambda kind: -len(kind.nodes) * _elements(kind.nodes[0]))


def kind_of(node: fx.Node, free: set[fx.Node], *members: fx.Node) -> Kind:
    """Returns the kind of a node, with these nodes as its members."""
    body, _ = _alone(node, free)
    return Kind(_subject(node), _key(body), list(members), free)


def _alone(node: fx.Node, free: set[fx.Node]) -> tuple[Body, list[fx.Node]]:
    wanted = output_nodes_of(node)
    return body_of([node], wanted, free), wanted


def _gives_tensors(node: fx.Node) -> bool:
    return all(isinstance(made.meta["val"], torch.Tensor) for made in output_nodes_of(node))


def _key(body: Body) -> str:
    """Returns a text of all that a segment computes, without the names of its nodes."""
    names = {node: f"input {number}" for number, node in enumerate(body.inputs)}
    lines = [f"{names[node]}: {_described(node.meta['val'])}" for node in body.inputs]
    for number, node in enumerate(body.nodes):
        names[node] = f"value {number}"
        target = _described(node.meta["val"]) if node.op == "get_attr" else node.target
        lines.append(f"{target} {fx.map_arg((node.args, node.kwargs), names.__getitem__)}")
    return "\n".join(lines)


def text_of(graph: fx.Graph, assignment: Assignment) -> str:
    """Returns a text of all that a choice for this graph depends on."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        described = [_described(item) for item in (value if isinstance(value, tuple | list) else [value])]
        runner = assignment.runner.get(node, "")
        lines.append(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {described} {runner}")
    return "\n".join(lines)


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return str(synthetic_value(value))
    return f"{value.dtype} {tuple(map(hint, value.shape))} {tuple(map(hint, value.stride()))}"


def _subject(node: fx.Node) -> str:
    """Returns an operator and the sizes of its inputs, for the report."""
    tensors = fakes_in([argument.meta.get("val") for argument in node.all_input_nodes])
    sizes = [" x ".join(str(hint(size)) for size in tensor.shape) or "1" for tensor in tensors]
    types = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return f"{op_name(node)} of {', '.join(sizes)} ({', '.join(types)})" if sizes else op_name(node)


def _elements(node: fx.Node) -> int:
    fakes = fakes_in([item.meta.get("val") for item in [node, *node.all_input_nodes]])
    return sum(map(hinted_elements, fakes))


def _fail(error: Exception) -> NoReturn:
    raise error
