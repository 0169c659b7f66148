"""Describes a part of a graph as the text of a Python module, which another process can read.

The module has three functions of the part's symbolic sizes: `inputs` and `outputs` return the layouts of its tensors,
and `run` computes the outputs with PyTorch's operators.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from ort_accel.graph.memory_layout import has_no_gaps
from ort_accel.graph.nodes import is_getitem
from ort_accel.graph.symbolic_sizes import expression, hint, without_empty
from ort_accel.lowering.call_program import dense

KERNELS = "_ORT_ACCEL_KERNELS"
"""The variable of a graph's program that stands for Inductor's compiler."""


def kernel_name(graph: str, position: int) -> str:
    """Returns the name of one of the kernels of a cluster or a graph."""
    return f"{graph}_k{position}"


def checked_name(kernel: str) -> str:
    """Returns the name of the function that calls a kernel and returns its error."""
    return f"{kernel}_checked"


class NotDescribable(Exception):
    """Raised for a part with a node or an argument that a module cannot name."""


@dataclass(frozen=True)
class Layout:
    """The type, sizes and strides of a tensor."""

    dtype: torch.dtype
    shape: Sequence[Any]
    strides: Sequence[Any]


@dataclass
class Part:
    """A part of a graph."""

    nodes: list[fx.Node]
    """In the order of the graph."""
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    source: str = ""
    """The module. Equal parts have equal modules."""
    symbols: list[torch.SymInt] = field(default_factory=list)
    """The sizes that the functions take, in their order."""

    @property
    def names(self) -> list[str]:
        """Returns the symbols' names in the graph."""
        return [str(symbol.node.expr) for symbol in self.symbols]

    def describe(self) -> None:
        """Write the module; raises `NotDescribable`."""
        _Writer(self).write()

    @property
    def hints(self) -> dict[str, int]:
        """Returns the symbols' values at the sizes of the capture."""
        return {f"s{at}": hint(symbol) for at, symbol in enumerate(self.symbols)}


class Description:
    """The functions of a module."""

    def __init__(self, source: str, name: str) -> None:
        names: dict[str, Any] = {"torch": torch, "operator": operator, "math": math, "Layout": Layout}
        exec(compile(source, name, "exec"), names)
        self.run: Callable[..., Sequence[torch.Tensor]] = names["run"]
        self.inputs: Callable[..., Sequence[Layout]] = names["inputs"]
        self.outputs: Callable[..., Sequence[Layout]] = names["outputs"]


class _Writer:
    """Writes a part as a Python module."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._names: dict[fx.Node, str] = {node: f"a{at}" for at, node in enumerate(part.inputs)}
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._sizes: list[torch.SymInt] = []
        self._lines: list[str] = []
        self._printer = PythonPrinter()

    def write(self) -> None:
        """Set the part's source and symbols; raises `NotDescribable`."""
        part = self._part
        if not all(has_no_gaps(node.meta["val"]) for node in part.outputs):
            raise NotDescribable("a result with gaps in memory")
        for node in part.nodes:
            self._name(node)
        inputs = ", ".join(self._layout(dense(node.meta["val"])) for node in part.inputs)
        outputs = ", ".join(self._layout(node.meta["val"]) for node in part.outputs)
        results = "".join(f"{self._name(node)}, " for node in part.outputs)
        symbols = [str(symbol) for symbol in self._symbols.values()]
        given = ", ".join([*symbols, *map(self._name, part.inputs)])
        part.symbols = self._sizes
        part.source = "\n".join(
            [
                *_function("inputs", ", ".join(symbols), [f"return [{inputs}]"]),
                *_function("outputs", ", ".join(symbols), [f"return [{outputs}]"]),
                *_function("run", given, [*self._lines, f"return ({results})"]),
            ]
        )

    def _name(self, node: fx.Node) -> str:
        if node not in self._names:
            if node.op != "call_function":
                raise NotDescribable(node.op)
            target = "operator.getitem" if is_getitem(node) else f"torch.ops.{node.target}"
            arguments = [self._value(item) for item in node.args]
            arguments += [f"{name}={self._value(item)}" for name, item in node.kwargs.items()]
            name = f"n{len(self._names)}"
            self._lines.append(f"{name} = {target}({', '.join(arguments)})")
            self._names[node] = name
        return self._names[node]

    def _value(self, item: Any) -> str:
        match item:
            case fx.Node() if isinstance(item.meta.get("val"), int | torch.SymInt):
                return self._size(item.meta["val"])
            case fx.Node() if isinstance(item.meta.get("val"), torch.Tensor | tuple | list):
                return self._name(item)
            case list() | tuple():
                return f"[{', '.join(map(self._value, item))}]"
            case float() if not math.isfinite(item):
                return f"float({str(item)!r})"
            case torch.SymInt():
                return self._size(item)
            case None | bool() | int() | float() | str():
                return repr(item)
            case torch.dtype() | torch.memory_format() | torch.layout():
                return str(item)
            case torch.device():
                return f"torch.device({item.type!r})"
        raise NotDescribable(type(item).__name__)

    def _size(self, size: int | torch.SymInt, change: Callable[[sympy.Expr], sympy.Expr] = lambda found: found) -> str:
        found = expression(size)
        if isinstance(found, int):
            return str(found)
        assert isinstance(size, torch.SymInt)
        for symbol in sorted(found.free_symbols, key=str):
            if symbol not in self._symbols:
                self._symbols[symbol] = sympy.Symbol(f"s{len(self._symbols)}", integer=True, positive=True)
                env = size.node.shape_env
                if symbol not in env.backed_var_to_val:
                    raise NotDescribable("a size that follows from data")
                self._sizes.append(env.create_symintnode(symbol, hint=int(env.backed_var_to_val[symbol])))
        text: str = self._printer.doprint(change(found).xreplace(self._symbols))
        return text

    def _layout(self, fake: torch.Tensor) -> str:
        shape = "".join(f"{self._size(size)}, " for size in fake.shape)
        strides = "".join(f"{self._size(stride, without_empty)}, " for stride in fake.stride())
        return f"Layout({fake.dtype}, ({shape}), ({strides}))"


def _function(name: str, parameters: str, lines: Sequence[str]) -> list[str]:
    return [f"def {name}({parameters}):", *(f"    {line}" for line in lines), ""]
