"""Building one ONNX model, operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
import sympy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ort_accel.graph.symbolic_sizes import Size, expression

DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""Types that PyTorch computes with in single precision, to round once."""

MICROSOFT = "com.microsoft"


class NotLowerable(Exception):
    """This node cannot be written in ONNX; the text says why."""


class Slower(NotLowerable):
    """ONNX Runtime could run this node, but PyTorch's kernel is faster; the text gives measured times."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor in the ONNX graph, and the fake tensor with its type and sizes."""

    value: ir.Value
    fake: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.fake.dtype

    @property
    def shape(self) -> torch.Size:
        return self.fake.shape

    @property
    def ndim(self) -> int:
        return self.fake.ndim


class HasValue(Protocol):
    """An `Operand` or a `Term`."""

    @property
    def value(self) -> Value: ...


Value = ir.Value
Input = ir.Value | HasValue | None
Number = int | float | bool | torch.SymInt


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """Return the ONNX type of a torch type."""
    if dtype not in DTYPES:
        raise NotLowerable(f"ONNX Runtime has no {dtype}")
    return DTYPES[dtype]


def describe(value: ir.Value, fake: torch.Tensor) -> None:
    """Give a value the type and the fixed sizes of a tensor."""
    value.type = ir.TensorType(onnx_dtype(fake.dtype))
    value.shape = ir.Shape([size if isinstance(size, int) else None for size in fake.shape])


def axis(dim: int, ndim: int) -> int:
    """Return a dimension counted from the front."""
    return dim % ndim if ndim else 0


@dataclass(frozen=True)
class SizeInput:
    """An int64 input of the model: the sizes of a shape, or (as `scalar`) a single number."""

    value: ir.Value
    sizes: tuple[int | sympy.Expr, ...]
    scalar: bool


class OnnxGraph:
    """One ONNX model under construction.

    Lowerings call `op` for operators, and `constant`, `scalar` and `sizes` for constants. `result` is the fake tensor,
    or the tuple of them, that the node being lowered returns.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.inputs: list[ir.Value] = []
        self.size_inputs: dict[tuple[Any, ...], SizeInput] = {}
        self.nodes: list[ir.Node] = []
        self.result: Any = None
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._counter = 0
        self._table: dict[sympy.Expr, int] = {}
        self.frame_readers: Counter[int] = Counter()
        """The number of operators that read each tensor of the frame."""
        self.number_ops: set[str] = set()
        """Names of the copies of operators that are called (`kernels/number_ops.py`)."""

    def _name(self, hint: str) -> str:
        self._counter += 1
        return f"{hint}_{self._counter}"

    def input(self, name: str, fake: torch.Tensor) -> Operand:
        """Add an input of the model."""
        value = ir.Value(name=name)
        describe(value, fake)
        self.inputs.append(value)
        return Operand(value, fake)

    def op(self, op_type: str, *inputs: Input, domain: str = "", **attributes: Any) -> Value:
        """Add one operator, and return its result. Attributes that are None are left out."""
        (result,) = self.op_with_outputs(op_type, 1, *inputs, domain=domain, **attributes)
        return result

    def op_with_outputs(
        self, op_type: str, outputs: int, *inputs: Input, domain: str = "", **attributes: Any
    ) -> tuple[Value, ...]:
        """Add one operator, and return so many results."""
        values = [item if item is None or isinstance(item, ir.Value) else item.value for item in inputs]
        while values and values[-1] is None:  # named as absent, a last input crashed onnxruntime-training 1.19.2
            values.pop()
        results = [ir.Value(name=self._name(op_type)) for _ in range(outputs)]
        given = {name: value for name, value in attributes.items() if value is not None}
        node = ir.node(op_type, values, given, domain=domain, outputs=results, name=self._name(op_type))
        self.nodes.append(node)
        return tuple(results)

    def extend(self, nodes: Iterable[ir.Node]) -> None:
        """Add operators of another graph; they and their outputs get names of this graph."""
        for node in nodes:
            node.name = self._name(node.op_type)
            for output in node.outputs:
                output.name = self._name(node.op_type)
            self.nodes.append(node)

    def constant(self, array: np.ndarray[Any, Any]) -> Value:
        """Return a constant; equal ones are shared."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._name("constant")
            kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            value = ir.Value(name=name, type=kind, shape=ir.Shape(array.shape))
            value.const_value = ir.tensor(array, name=name)
            self._constants[key] = value
        return self._constants[key]

    def tensor(self, tensor: torch.Tensor) -> Value:
        """Return a torch tensor as a constant."""
        with _disable_current_modes():  # a lowering runs while the caller traces
            if tensor.dtype == torch.bfloat16:  # which numpy does not have
                return self.cast_from(self.tensor(tensor.float()), torch.float32, tensor.dtype)
            return self.constant(tensor.detach().cpu().contiguous().numpy())

    def scalar(self, number: object, dtype: torch.dtype) -> Value:
        """Return a 0-dimensional constant, or an input of the model where the number is a size that may change."""
        if isinstance(number, torch.SymInt):
            return self.cast_from(self._size_input((number,), scalar=True), torch.int64, dtype)
        if not isinstance(number, int | float | bool):
            raise NotLowerable(f"a scalar of type {type(number).__name__}")
        if dtype == torch.bfloat16:
            return self.cast_from(self.scalar(number, torch.float32), torch.float32, dtype)
        kind = onnx_dtype(dtype).numpy()
        if kind.kind in "iu" and not (np.iinfo(kind).min <= int(number) <= np.iinfo(kind).max):
            raise NotLowerable(f"{number} does not fit into {dtype}")
        with np.errstate(over="ignore"):
            return self.constant(np.array(number, dtype=kind))

    def ints(self, numbers: Sequence[int]) -> Value:
        """Return a constant list of integers."""
        return self.constant(np.array(numbers, dtype=np.int64))

    def sizes(self, sizes: Sequence[Size]) -> Value:
        """Return a list of sizes: a constant where all are fixed, otherwise an input of the model."""
        if all(isinstance(expression(size), int) for size in sizes):
            return self.ints([int(size) for size in sizes])
        return self._size_input(tuple(sizes), scalar=False)

    def _size_input(self, sizes: tuple[Size, ...], *, scalar: bool) -> Value:
        key = (scalar, *(expression(size) for size in sizes))
        if key not in self.size_inputs:
            shape = ir.Shape([] if scalar else [len(sizes)])
            value = ir.Value(name=self._name("sizes"), type=ir.TensorType(ir.DataType.INT64), shape=shape)
            self.size_inputs[key] = SizeInput(value, key[1:], scalar)
        return self.size_inputs[key].value

    @cached_property
    def size_table(self) -> Value:
        """The input of the model that holds, as one list, the sizes that calls of PyTorch's operators read."""
        return ir.Value(name="size_table", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([None]))

    @cached_property
    def frame(self) -> Value:
        """The input of the model that holds tensors of PyTorch by their addresses, and the readers of each."""
        return ir.Value(name="frame", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([None]))

    def size_position(self, size: sympy.Expr) -> int:
        """Return the position of a size in the table."""
        return self._table.setdefault(size, len(self._table))

    @property
    def all_size_inputs(self) -> list[SizeInput]:
        """All inputs of the model that are sizes."""
        given = list(self.size_inputs.values())
        return [*given, SizeInput(self.size_table, tuple(self._table), scalar=False)] if self._table else given

    def cast_from(self, value: Value, source: torch.dtype, target: torch.dtype) -> Value:
        """Cast a value whose type is known."""
        if source == target:
            return value
        return self.op("Cast", value, to=int(onnx_dtype(target)))

    def cast(self, operand: Operand, dtype: torch.dtype) -> Value:
        """Cast a tensor; one that has the type already stays."""
        return self.cast_from(operand.value, operand.dtype, dtype)

    def reshape(self, value: Input, sizes: Sequence[Size]) -> Value:
        """Add a `Reshape`. With one open size the shape is a constant, so that ONNX Runtime can optimize."""
        fixed = [expression(size) for size in sizes]
        open_sizes = [size for size in fixed if not isinstance(size, int)]
        if len(open_sizes) == 1 and all(size for size in fixed if isinstance(size, int)):
            shape = self.ints([size if isinstance(size, int) else -1 for size in fixed])
            return self.op("Reshape", value, shape)
        return self.op("Reshape", value, self.sizes(sizes), allowzero=1)

    def _read_nodes(self, outputs: Sequence[ir.Value]) -> list[ir.Node]:
        """Return all operators but transposes that nobody reads, since products take their sources."""

        def is_read(value: ir.Value) -> bool:
            return bool(value.uses()) or value in outputs

        return [node for node in self.nodes if node.op_type != "Transpose" or is_read(node.outputs[0])]

    def model(self, outputs: Sequence[ir.Value], name: str) -> ir.Model:
        """Return the finished model."""
        domains = {"": self.opset} | {node.domain: 1 for node in self.nodes if node.domain}
        constants = list(self._constants.values())
        if "size_table" in vars(self) and not self._table:
            self.size_table.shape = ir.Shape([1])
            self.size_table.const_value = ir.tensor(np.zeros(1, np.int64), name=self.size_table.name)
            constants.append(self.size_table)
        graph = ir.Graph(
            [*self.inputs, *([self.frame] if self.frame_readers else []), *(s.value for s in self.all_size_inputs)],
            outputs,
            nodes=self._read_nodes(outputs),
            initializers=constants,
            opset_imports=domains,
            name=name,
        )
        return ir.Model(graph, ir_version=9, producer_name="ort_accel")
