"""Runs a compiled graph: segments in order, each of which reads and writes numbered registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ort_accel.graph.symbolic_sizes import SizeFunction, SymbolSource
from ort_accel.memory.out_of_memory import explain_out_of_memory
from ort_accel.operators.flops import GraphFlops
from ort_accel.runtime.work_count import WORK

Symbols = dict[str, int]
"""The values of the symbols in sizes."""

Inputs: TypeAlias = list[Any]
Outputs: TypeAlias = Sequence[Any]
"""Tensors, and numbers that follow from what tensors hold."""

Run = Callable[[Inputs, Symbols], Outputs]
"""Runs a segment. It may empty the list of its inputs."""


@dataclass
class Step:
    """One segment, with the registers that it reads and writes."""

    run: Run
    inputs: list[int]
    outputs: list[int]
    last_use: list[int] = field(default_factory=list)
    """Registers that no later step reads."""
    unread: list[int] = field(default_factory=list)
    """Registers that it writes and nobody reads."""


class Program:
    """Runs all steps with a list of inputs, which it empties so that memory is freed early."""

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
        self._boxed_call = True  # tells AOTAutograd that the call takes one list and may empty it
        self.steps = steps
        self._registers = registers
        self._symbols = symbols
        self._outputs = outputs
        self._output_sizes = output_sizes
        self._before_each = before_each
        self.flops: GraphFlops | None = None
        """The floating point operations of a run; None where nobody counts them."""

    def __call__(self, args: Inputs) -> list[Any]:
        """Runs all segments. Outputs that are sizes are computed from the symbols."""
        registers: list[Any] = [*args, *([None] * (self._registers - len(args)))]
        args.clear()
        symbols: Symbols = {}
        self._symbols.read(registers, symbols)
        if WORK.is_on and self.flops is not None:
            WORK.add(self.flops(symbols))
        for step in self.steps:
            self._before_each()
            tensors = [registers[index] for index in step.inputs]
            for index in step.last_use:  # before the step, so that the step can free its inputs early
                registers[index] = None
            try:
                _store(step.run(tensors, symbols), step.outputs, registers)
            except Exception as error:
                explain_out_of_memory(error)
                raise
            for index in step.unread:
                registers[index] = None
        sizes = iter(self._output_sizes(symbols))
        return [
            None if index is None else next(sizes) if index == SIZE else registers[index] for index in self._outputs
        ]


def _store(results: Outputs, indices: Sequence[int], registers: list[Any]) -> None:
    """Stores results. A function of its own leaves no other reference to them."""
    for index, result in zip(indices, results, strict=True):
        registers[index] = result


SIZE = -1
"""Index in the list of outputs that stands for a size."""


def mark_last_uses(steps: Sequence[Step], kept: set[int]) -> None:
    """Notes in each step the registers that it is the last to read, or that nobody reads."""
    needed = set(kept)
    for step in reversed(steps):
        step.unread = [index for index in dict.fromkeys(step.outputs) if index not in needed]
        step.last_use = [index for index in dict.fromkeys(step.inputs) if index not in needed]
        needed.update(step.inputs)
