"""Probes for the ONNX Runtime kernels that decide how a graph is lowered: each is the smallest node that runs one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import onnx
    from numpy.typing import NDArray

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Sample:
    """One input of a probe: an array of this shape, filled with one value."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    value: float = 1

    def array(self) -> NDArray[numpy.generic]:
        """Returns the array."""
        import numpy

        return numpy.full(self.shape, self.value, self.dtype)


@dataclass(frozen=True)
class Probe:
    """A node with small inputs. A runtime that loads and runs it has the kernel."""

    op: str
    inputs: tuple[Sample, ...]
    attributes: Mapping[str, Any]
    outputs: Sequence[str]
    """The element type of each output."""
    domain: str
    version: int
    """The version of the domain's operator set."""

    @property
    def name(self) -> str:
        """The operator with its domain, such as `com.microsoft.GatherGrad`."""
        return f"{self.domain or 'ai.onnx'}.{self.op}"

    def feeds(self) -> dict[str, NDArray[numpy.generic]]:
        """Returns the inputs by name."""
        return {f"in{index}": sample.array() for index, sample in enumerate(self.inputs)}

    def model(self) -> onnx.ModelProto:
        """Returns the node as a model, with an old IR version that every runtime loads."""
        from onnx import helper

        inputs = [
            helper.make_tensor_value_info(name, _element_type(str(array.dtype)), array.shape)
            for name, array in self.feeds().items()
        ]
        outputs = [
            helper.make_tensor_value_info(f"out{index}", _element_type(dtype), None)
            for index, dtype in enumerate(self.outputs)
        ]
        names = [value.name for value in inputs], [value.name for value in outputs]
        node = helper.make_node(self.op, *names, domain=self.domain, **self.attributes)
        imports = [helper.make_opsetid("", self.version if not self.domain else 17)]
        if self.domain:
            imports.append(helper.make_opsetid(self.domain, self.version))
        return helper.make_model(
            helper.make_graph([node], "probe", inputs, outputs), opset_imports=imports, ir_version=8
        )


def _element_type(dtype: str) -> int:
    import numpy
    from onnx import helper

    return helper.np_dtype_to_tensor_dtype(numpy.dtype(dtype))


def _microsoft(op: str, *inputs: Sample, outputs: Sequence[str] = ("float32",), **attributes: object) -> Probe:
    return Probe(op, inputs, attributes, outputs, MICROSOFT, 1)


def _onnx(
    version: int, op: str, *inputs: Sample, outputs: tuple[str, ...] = ("float32",), **attributes: object
) -> Probe:
    return Probe(op, inputs, attributes, outputs, "", version)


_ROWS = Sample((2, 4))
_TOKENS = Sample((1, 2, 4))
_FEATURES = Sample((4,))
_STATISTIC = Sample((2, 1))
_LABELS = Sample((2,), "int64")
_SCALAR = Sample(())
_FLAG = Sample((), "bool")

_TRAINING = (
    _microsoft("BiasFastGeluGrad_dX", _ROWS, _ROWS, _FEATURES),
    _microsoft("BiasGeluGrad_dX", _ROWS, _ROWS, _FEATURES),
    _microsoft("DropoutGrad", _ROWS, Sample((2, 4), "bool"), Sample((), value=0.5), _FLAG),
    _microsoft("FastGeluGrad", _ROWS, _ROWS),
    _microsoft("GatherElementsGrad", _ROWS, Sample((2,), "int64", 4), Sample((2, 4), "int64"), axis=0),
    _microsoft("GatherGrad", Sample((2,), "int64", 4), _LABELS, _ROWS, axis=0),
    _microsoft("GatherNDGrad", Sample((2,), "int64", 4), Sample((2, 1), "int64"), _ROWS),
    _microsoft("GeluGrad", _ROWS, _ROWS),
    _microsoft(
        "LayerNormalizationGrad", _ROWS, _ROWS, _FEATURES, _STATISTIC, _STATISTIC, outputs=("float32",) * 3, axis=1
    ),
    _microsoft("LogSoftmaxGrad_13", _ROWS, _ROWS, axis=1),
    _microsoft("QuickGeluGrad", _ROWS, _ROWS),
    _microsoft("ReluGrad", _ROWS, _ROWS),
    _microsoft("SigmoidGrad", _ROWS, _ROWS),
    _microsoft(
        "SimplifiedLayerNormalizationGrad", _ROWS, _ROWS, _FEATURES, _STATISTIC, outputs=("float32",) * 2, axis=1
    ),
    _microsoft("SoftmaxCrossEntropyLossInternal", _ROWS, _LABELS, outputs=("float32",) * 2, reduction="mean"),
    _microsoft("SoftmaxCrossEntropyLossInternalGrad", _SCALAR, _ROWS, _LABELS, reduction="mean"),
    _microsoft("SoftmaxGrad_13", _ROWS, _ROWS, axis=1),
    _microsoft("TanhGrad", _ROWS, _ROWS),
)
_FUSED = (
    _microsoft("BiasGelu", _ROWS, _FEATURES),
    _microsoft("FastGelu", _ROWS, _FEATURES),
    _microsoft("FusedGemm", _ROWS, Sample((4, 4)), _FEATURES, activation="Relu"),
    _microsoft("FusedMatMul", _ROWS, _ROWS, transB=1),
    _microsoft("Gelu", _ROWS),
    _microsoft("MultiHeadAttention", _TOKENS, _TOKENS, _TOKENS, num_heads=2),
    _microsoft("QuickGelu", _ROWS),
    _microsoft("SkipLayerNormalization", _TOKENS, _TOKENS, _FEATURES, _FEATURES),
    _microsoft("SkipSimplifiedLayerNormalization", _TOKENS, _TOKENS, _FEATURES),
    _onnx(17, "SimplifiedLayerNormalization", _ROWS, _FEATURES, axis=1),
)
_RECENT = (
    _onnx(20, "Gelu", _ROWS),
    _onnx(23, "Attention", _TOKENS, _TOKENS, _TOKENS, q_num_heads=2, kv_num_heads=2),
    _onnx(23, "RMSNormalization", _ROWS, _FEATURES),
    _onnx(23, "RotaryEmbedding", Sample((1, 1, 2, 4)), Sample((1, 2, 2)), Sample((1, 2, 2))),
    _onnx(24, "Swish", _ROWS),
)

TRAINING = tuple(probe.name for probe in _TRAINING)
"""Kernels of gradients and losses, which only training builds have."""

FUSED = tuple(probe.name for probe in _FUSED)
"""Fused kernels outside of the ONNX standard."""

RECENT = tuple(probe.name for probe in _RECENT)
"""Kernels of operators in recent ONNX operator sets."""

PROBES = {probe.name: probe for probe in (*_TRAINING, *_FUSED, *_RECENT)}
