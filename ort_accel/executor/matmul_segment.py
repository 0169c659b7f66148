"""Runs a segment of products in ONNX Runtime, and by oneDNN for sizes that came before."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ort_accel.executor.ort_segment import OrtSegment
from ort_accel.executor.program import Inputs, Outputs, Symbols
from ort_accel.executor.torch_segment import PyTorchSegment
from ort_accel.graph.nodes import fakes_in
from ort_accel.graph.symbolic_sizes import SizeFunction, expression
from ort_accel.kernels.onednn_matmul import FrequentSizes
from ort_accel.reporting import Runner, Segment


class MatmulSegment:
    """Runs a segment of products whose sizes vary: by oneDNN where it knows the sizes and is faster."""

    def __init__(
        self,
        by_ort: OrtSegment,
        by_onednn: PyTorchSegment,
        nodes: Iterable[fx.Node],
        record: Segment,
    ) -> None:
        """`record` notes who ran the segment last."""
        self.inputs = by_ort.inputs
        self._by_ort, self._by_onednn = by_ort, by_onednn
        values = [tensor for node in nodes for tensor in fakes_in(node.meta["val"])]
        self._sizes = SizeFunction(expression(size) for value in values for size in value.shape)
        self._known_sizes, self._record = FrequentSizes(), record

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"inputs": []}

    def __call__(self, tensors: Inputs, symbols: Symbols) -> Outputs:
        """Runs with these inputs."""
        sizes = self._sizes(symbols)
        if sizes not in self._known_sizes and not self._known_sizes.came(sizes):
            return self._by_ort(tensors, symbols)
        self._record.runner = Runner.PYTORCH
        return self._by_onednn(tensors, symbols)
