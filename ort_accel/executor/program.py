"""A lowered graph, ready to run: segments in order, each reading and writing numbered registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource
from ort_accel.memory.out_of_memory import explain_lack_of_memory

Registers = list[Any]
Symbols = dict[str, int]


@dataclass
class Step:
    """One segment: what it reads, and what it writes."""

    run: Callable[[list[Any], Symbols], Sequence[Any]]
    inputs: list[int]
    outputs: list[int]
    last_use: list[int] = field(default_factory=list)
    """What it is the last to read."""
    unread: list[int] = field(default_factory=list)
    """What it writes and nobody reads."""


class Program:
    """Callable with a list of inputs, which it empties, so that memory is free as soon as it can be."""

    def __init__(
        self,
        steps: list[Step],
        registers: int,
        symbols: SymbolSource,
        outputs: list[int | None],
        output_sizes: SizeFunction,
        before_each: Callable[[], None],
    ) -> None:
        """`before_each` is called before each step."""
        self._boxed_call = True  # AOTAutograd's sign for "takes one list and may empty it"; copied with __dict__
        self.steps = steps
        self._registers = registers
        self._symbols = symbols
        self._outputs = outputs
        self._output_sizes = output_sizes
        self._before_each = before_each

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run all segments. An output that is a size, not a tensor, is computed from the symbols."""
        registers: Registers = [*args, *([None] * (self._registers - len(args)))]
        args.clear()
        symbols: Symbols = {}
        self._symbols.read(registers, symbols)
        for step in self.steps:
            self._before_each()
            tensors = [registers[index] for index in step.inputs]
            for index in step.last_use:  # before the step, which can then free what it no longer needs
                registers[index] = None
            try:
                _put(step.run(tensors, symbols), step.outputs, registers)
            except Exception as error:
                explain_lack_of_memory(error)
                raise
            for index in step.unread:
                registers[index] = None
        sizes = iter(self._output_sizes(symbols))
        return [
            None if index is None else next(sizes) if index == SIZE else registers[index] for index in self._outputs
        ]


def _put(results: Sequence[Any], places: Sequence[int], registers: Registers) -> None:
    """Note results, in a function of its own, so that nothing but the registers holds on to them afterwards."""
    for index, result in zip(places, results, strict=True):
        registers[index] = result


SIZE = -1
"""Stands in the list of outputs for a size."""


def mark_last_uses(steps: Sequence[Step], kept: set[int]) -> None:
    """Let each step clear the registers that are read for the last time in it, or never."""
    needed = set(kept)
    for step in reversed(steps):
        step.unread = [index for index in dict.fromkeys(step.outputs) if index not in needed]
        step.last_use = [index for index in dict.fromkeys(step.inputs) if index not in needed]
        needed.update(step.inputs)


def as_tensors(results: Any) -> Sequence[torch.Tensor]:
    """The results of a PyTorch segment as a sequence."""
    return results if isinstance(results, tuple | list) else (results,)
