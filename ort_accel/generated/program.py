"""Runs a whole segment by the Python and the kernels that Inductor has written for its graph."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ort_accel.errors import in_a_line
from ort_accel.executor.ort_segment import OrtSegment
from ort_accel.executor.program import Inputs, Outputs, Symbols
from ort_accel.generated.builds import load_library
from ort_accel.generated.description import KERNELS, Description, checked_name, kernel_name
from ort_accel.generated.whole_graph import WholeGraph
from ort_accel.reporting.segments import Runner

C_TYPES: dict[str, type[ctypes.c_int64 | ctypes.c_double | ctypes.c_float]] = {
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
}


class InductorProgram:
    """A segment whose graph Inductor has compiled.

    Where it fails, the segment runs as it was compiled at first, and from then on if that succeeds. After a bad batch,
    the segment raises what eager mode raises.
    """

    def __init__(self, segment: OrtSegment, name: str, graph: WholeGraph, wrapper: str, library: bytes) -> None:
        self._segment = segment
        self._content = name, graph.source, wrapper, library
        self._names, self._constants = graph.names, graph.constants
        self._is_proven = False
        self.error = ""
        self.copied: list[int] = []
        """The positions of results that are copied, since they lie in the memory of an input or of another result."""
        self._load()

    def _load(self) -> None:
        """Create what cannot be pickled."""
        name, source, wrapper, library = self._content
        self._description = Description(source, name)
        self._layouts: tuple[tuple[int, ...], list[tuple[int, ...]]] | None = None
        functions: dict[str, Any] = {"__name__": name, KERNELS: _Kernels(load_library(library), name)}
        exec(compile(wrapper, name, "exec"), functions)
        self._call: Callable[[list[Any]], Sequence[torch.Tensor]] = functions["call"]

    def _sizes(self, symbols: Symbols) -> tuple[int, ...]:
        return tuple(map(symbols.__getitem__, self._names))

    @property
    def has_given_up(self) -> bool:
        """True after a failure."""
        return bool(self.error)

    def result_bytes(self, symbols: Symbols) -> int:
        """Returns the bytes of its results."""
        layouts = self._description.outputs(*self._sizes(symbols))
        return sum(math.prod(map(int, each.shape)) * each.dtype.itemsize for each in layouts)

    def __getstate__(self) -> dict[str, object]:
        of_process = ("_description", "_layouts", "_call")
        return {name: value for name, value in self.__dict__.items() if name not in of_process}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._load()

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs with these inputs."""
        if self.has_given_up:
            return self._segment(tensors, symbols)
        sizes = self._sizes(symbols)
        given = [*sizes, *self._laid_out(tensors, sizes), *self._constants]
        if self._segment.frees_inputs and self._is_proven:
            tensors.clear()
        try:
            with torch.no_grad():
                results = list(self._call(given))
                for position in self.copied:
                    results[position] = results[position].clone()
        except Exception as error:
            if not tensors:
                raise RuntimeError(f"a backward failed in a program of Inductor: {error}") from error
            replacement = self._segment(tensors, symbols)
            self.error = in_a_line(error)
            return replacement
        self._is_proven = True
        self._segment.record.runner = Runner.INDUCTOR
        return results

    def _laid_out(self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> list[torch.Tensor]:
        """Returns tensors with the strides that the program expects: the same ones, or copies."""
        known = self._layouts
        if known is None or known[0] != sizes:
            layouts = self._description.inputs(*sizes)
            known = self._layouts = sizes, [tuple(map(int, each.strides)) for each in layouts]
        return [
            tensor if tensor.stride() == strides else _copied(tensor, strides)
            for tensor, strides in zip(tensors, known[1], strict=False)
        ]


def _copied(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _Kernels:
    """Stands for Inductor's compiler where a program is loaded: the kernels are compiled already."""

    def __init__(self, library: ctypes.CDLL, graph: str) -> None:
        self._library, self._graph, self._count = library, graph, 0

    def cpp_pybinding(self, types: Sequence[str], _: str) -> Callable[..., None]:
        """Returns the next kernel, which takes arguments of these types."""
        kernel = self._library[checked_name(kernel_name(self._graph, self._count))]
        self._count += 1
        are_pointers = [kind.endswith("*") for kind in types]
        kernel.restype = ctypes.c_char_p
        kernel.argtypes = [
            ctypes.c_void_p if is_pointer else C_TYPES[kind.removeprefix("const ")]
            for kind, is_pointer in zip(types, are_pointers, strict=True)
        ]

        def call(*values: Any) -> None:
            arguments = [
                value.data_ptr() if is_pointer else value
                for value, is_pointer in zip(values, are_pointers, strict=True)
            ]
            if error := kernel(*arguments):
                raise RuntimeError(error.decode(errors="replace"))

        return call

    def wait(self, _: object) -> None:
        """Do nothing: no compilation runs."""
