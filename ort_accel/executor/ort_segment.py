"""Runs a segment in ONNX Runtime: one model, one session."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from traceback import clear_frames

import onnx_ir as ir
import torch
from torch import fx

from ort_accel.executor.build_model import Model
from ort_accel.executor.frame import Frame
from ort_accel.executor.program import Inputs, Outputs, Run, Symbols
from ort_accel.executor.torch_segment import PyTorchSegment
from ort_accel.graph.memory_layout import Order, reverse
from ort_accel.graph.symbolic_sizes import SizeFunction
from ort_accel.kernels import number_ops
from ort_accel.partition.segments import Body
from ort_accel.reporting.segments import Runner, Segment
from ort_accel.runtime.dlpack import CachedOrtValue, OrtValue, sizes_to_ort, to_ort
from ort_accel.runtime.sessions import Sessions


def _converter(keeps_address: bool, order: Order | None) -> Callable[[torch.Tensor], OrtValue]:
    """Returns what hands a tensor over in its order in memory; once, if it usually keeps its address."""
    convert = CachedOrtValue().value if keeps_address else to_ort
    return convert if order is None else lambda tensor: convert(tensor.permute(order))


class Twin:
    """The same segment in PyTorch, built when it is first needed."""

    def __init__(self, body: Body, wanted: Sequence[fx.Node], owner: fx.GraphModule) -> None:
        self._build = cache(lambda: PyTorchSegment(body, wanted, owner))

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs with these inputs."""
        return self._build()(tensors, symbols)

    def __reduce__(self) -> tuple[Callable[..., PyTorchSegment], tuple[object, ...]]:
        return _restored, (self._build().__getstate__(),)


def _restored(state: dict[str, object]) -> PyTorchSegment:
    segment = PyTorchSegment.__new__(PyTorchSegment)
    segment.__dict__.update(state)
    return segment


@dataclass(frozen=True)
class Fallback:
    """The way on for a segment after ONNX Runtime failed at it."""

    run: Run
    """Runs the same nodes in PyTorch."""
    tries_ort_again: Callable[[Exception], bool]
    """Called after a failure that PyTorch did not share; False keeps the segment in PyTorch."""


class OrtSegment:
    """Runs the nodes of a segment in one session; where that fails, PyTorch runs the same nodes.

    1. After a bad batch, PyTorch raises what eager mode raises.
    2. After a lack of memory or a fault in ONNX Runtime, PyTorch's result stands.
    """

    def __init__(
        self,
        model: Model,
        sessions: Sessions,
        keeps_address: Callable[[fx.Node], bool],
        fallback: Fallback,
        name: str,
        record: Segment | None = None,
        frees_inputs: bool = False,
    ) -> None:
        """`record` notes who ran the segment.

        With `frees_inputs`, a tensor's memory is free after its last use, once a run has succeeded. A run that fails
        later cannot be repeated in PyTorch then.
        """
        self.inputs = model.given
        self._fed = list(map(model.given.index, model.inputs))
        self._framed = list(map(model.given.index, model.framed))
        self._frame = Frame(model.framed, model.readers) if model.framed else None
        self.frees_inputs, self._is_proven = frees_inputs, False
        names = [value.name or "" for value in model.model.graph.inputs]
        content = ir.to_proto(model.model).SerializeToString()
        outputs = [value.name or "" for value in model.outputs]
        self._number_ops = model.number_ops
        self._session_arguments = sessions, content, names, outputs, name
        self._given = [
            (keeps_address(node), order) for node, order in zip(model.inputs, model.input_orders, strict=True)
        ]
        self._create_session()
        self._permuted = [
            (position, reverse(order)) for position, order in enumerate(model.output_orders) if order is not None
        ]
        self._sizes = SizeFunction(item for size in model.sizes for item in size.sizes)
        self._size_inputs = model.sizes
        self._fallback = fallback
        self._given_up = False
        self.record = record or Segment(name, Runner.ORT, {})

    def with_model(self, model: Model, fallback: Fallback, keeps_address: Callable[[fx.Node], bool]) -> OrtSegment:
        """Returns a segment that computes the same by another model."""
        sessions, _, _, _, name = self._session_arguments
        return OrtSegment(model, sessions, keeps_address, fallback, name, self.record, self.frees_inputs)

    @property
    def has_given_up(self) -> bool:
        """True if a run failed here, and its replacement runs from then on."""
        return self._given_up

    def fingerprint(self) -> str:
        """Returns a digest of the model and of the sizes that it gets."""
        _, content, names, outputs, _ = self._session_arguments
        sizes = self._sizes.sizes, None if self._frame is None else self._frame.sizes
        return hashlib.sha256(content + repr((names, outputs, sizes)).encode()).hexdigest()

    def _create_session(self) -> None:
        """Creates what cannot be pickled."""
        for name in self._number_ops:
            number_ops.define(name)
        sessions, *model = self._session_arguments
        self._session = sessions.create(*model)
        self._convert = [_converter(keeps_address, order) for keeps_address, order in self._given]
        self._size_cache: tuple[tuple[int, ...], list[OrtValue]] = ((), [])

    def __getstate__(self) -> dict[str, object]:
        of_process = ("_session", "_convert", "_size_cache")
        return {name: value for name, value in self.__dict__.items() if name not in of_process} | {"inputs": []}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._create_session()

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs with these inputs."""
        if self._given_up:
            return self._fallback.run(tensors, symbols)
        try:
            results = self._by_onnx_runtime(tensors, symbols)
        except Exception as error:
            if self._gives_inputs_away and not tensors:
                raise RuntimeError(f"a backward failed in ONNX Runtime: {error}") from error
            replacement = self._by_pytorch(error, tensors, symbols)
            self.record.runner = Runner.PYTORCH
            self._given_up = not self._fallback.tries_ort_again(error)
            return replacement
        self.record.runner = Runner.ORT
        for position, order in self._permuted:
            results[position] = results[position].permute(order)
        return results

    def _by_onnx_runtime(self, tensors: Inputs, symbols: Symbols) -> list[torch.Tensor]:
        fed, framed = ([tensors[at] for at in positions] for positions in (self._fed, self._framed))
        feeds = [convert(tensor) for convert, tensor in zip(self._convert, fed, strict=True)]
        if self._frame is None:
            return self._session(feeds + self._size_values(symbols))
        if self._gives_inputs_away:
            tensors.clear()
        try:
            with self._frame.open(framed, symbols) as frame:
                results = self._session([*feeds, frame, *self._size_values(symbols)])
        except Exception:
            if framed and not tensors:
                by_position = dict(zip([*self._fed, *self._framed], [*fed, *framed], strict=True))
                tensors += map(by_position.__getitem__, range(len(by_position)))
            raise
        self._is_proven = True
        return results

    @property
    def _gives_inputs_away(self) -> bool:
        """True if a run gives its inputs away, so that PyTorch cannot repeat it once a call has read them."""
        return self.frees_inputs and self._is_proven and self._frame is not None

    def _by_pytorch(self, error: Exception, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs the segment in PyTorch after a failure, with the memory that the failed run held."""
        clear_frames(error.__traceback__)
        return self._fallback.run(tensors, symbols)

    def _size_values(self, symbols: Symbols) -> list[OrtValue]:
        """Returns the model's size inputs, made anew only when a size has changed."""
        sizes = self._sizes(symbols)
        cached = self._size_cache  # read once: another thread may be running with other sizes
        if sizes is not cached[0]:
            remaining = iter(sizes)
            values = [
                sizes_to_ort([next(remaining) for _ in size.sizes], scalar=size.scalar) for size in self._size_inputs
            ]
            cached = self._size_cache = (sizes, values)
        return cached[1]
