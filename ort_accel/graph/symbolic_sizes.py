"""Handles sizes known only at run time: sympy expressions over the symbols that Dynamo gave to input dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import Max
from torch.utils._sympy.printers import PythonPrinter

Size = int | torch.SymInt


def expression(size: Size | sympy.Expr) -> int | sympy.Expr:
    """Returns a fixed size as an int, and another as an expression."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else size
    if isinstance(expr, sympy.Expr):
        return int(expr) if expr.is_Integer else expr
    return int(expr)


def same_stride(one: Size, other: Size) -> bool:
    """True if two strides are equal for every input that leaves their tensors with elements."""
    first, second = expression(one), expression(other)
    if isinstance(first, int) or isinstance(second, int):
        return first == second
    return bool(without_empty(first) == without_empty(second))


def without_empty(stride: sympy.Expr) -> sympy.Expr:
    """Returns the stride of a tensor with elements.

    PyTorch computes with `Max(1, size)` where a size may be 0, and in some operators with the size itself.
    """
    return stride.replace(
        lambda part: isinstance(part, Max) and len(part.args) == 2 and 1 in part.args,
        lambda part: next(item for item in part.args if item != 1),
    )


def known_equal(one: Size, other: Size) -> bool:
    """True if two sizes are provably equal for every input, without adding a guard."""
    first, second = expression(one), expression(other)
    if first == second:
        return True
    if isinstance(first, int) or isinstance(second, int):
        return False
    return _always_equal(first, second) or _are_guarded(one, other)


def same_shape(one: Sequence[Size], other: Sequence[Size]) -> bool:
    """True if two shapes are known to be equal."""
    return len(one) == len(other) and all(map(known_equal, one, other))


def _are_guarded(one: Size, other: Size) -> bool:
    """True if a guard of the graph says that both sizes are equal, as for tokens and labels."""
    if not isinstance(one, torch.SymInt) or not isinstance(other, torch.SymInt) or one.node.hint != other.node.hint:
        return False
    first, second = one.node.expr, other.node.expr
    equalities = {sympy.Eq(first, second), sympy.Eq(second, first)}
    return any(guard.expr in equalities for guard in one.node.shape_env.guards)


@lru_cache(maxsize=4096)
def _always_equal(first: sympy.Expr, second: sympy.Expr) -> bool:
    return bool(sympy.expand(first - second) == 0)


def hinted_elements(tensor: torch.Tensor) -> int:
    """Returns the number of elements of a fake tensor, at the sizes of the capture."""
    return math.prod(map(hint, tensor.shape))


def hinted_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a fake tensor, at the sizes of the capture."""
    return hinted_elements(tensor) * tensor.element_size()


def is_known(size: Size) -> bool:
    """True if a size follows from input sizes, and not from data."""
    return isinstance(size, int) or bool(size.node.has_hint())


def known_positive(size: Size) -> bool:
    """True if a size is provably above zero for every input, without adding a guard; symbolic sizes begin at 2."""
    if isinstance(size, int):
        return size > 0
    return is_known(size) and bool(size.node.shape_env.bound_sympy(size.node.expr).lower > 0)


def hint(size: Size) -> int:
    """Returns a size as of the capture; 1 where that is not known."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if is_known(size) else 1


class SizeFunction:
    """Computes a tuple of sizes from the values of the symbols, and caches the last one."""

    def __init__(self, sizes: Iterable[int | sympy.Expr]) -> None:
        self.sizes = tuple(sizes)
        symbols = {s for size in self.sizes if isinstance(size, sympy.Basic) for s in size.free_symbols}
        self.symbols = tuple(sorted(str(symbol) for symbol in symbols))
        printer = PythonPrinter()
        bodies = [str(size) if isinstance(size, int) else printer.doprint(size) for size in self.sizes]
        source = f"lambda {', '.join(self.symbols)}: ({''.join(body + ', ' for body in bodies)})"
        self._compute: Callable[..., tuple[int, ...]] = eval(source, {"math": math, "torch": torch})
        self._last: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __reduce__(self) -> tuple[type[SizeFunction], tuple[tuple[int | sympy.Expr, ...]]]:
        return SizeFunction, (self.sizes,)

    def __call__(self, values: dict[str, int]) -> tuple[int, ...]:
        """Returns the sizes for these values of the symbols."""
        key = tuple(values[symbol] for symbol in self.symbols)
        last = self._last  # read once: another thread may be running with other sizes
        if last is None or last[0] != key:
            last = self._last = (key, tuple(int(size) for size in self._compute(*key)))
        return last[1]


class SymbolSource:
    """Maps each symbol to the input that reveals its value: an int, or one dimension of a tensor."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[int, int | None]] = {}

    def learn(self, position: int, val: object) -> None:
        """Records the symbols that the value at this position reveals."""
        if isinstance(val, torch.SymInt) and isinstance(val.node.expr, sympy.Symbol):
            self._sources.setdefault(str(val.node.expr), (position, None))
        elif isinstance(val, torch.Tensor):
            for dim, size in enumerate(val.shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    self._sources.setdefault(str(size.node.expr), (position, dim))

    def read(self, registers: Sequence[Any], values: dict[str, int]) -> None:
        """Writes every symbol's value into `values`."""
        for symbol, (position, dim) in self._sources.items():
            values[symbol] = registers[position] if dim is None else registers[position].shape[dim]
