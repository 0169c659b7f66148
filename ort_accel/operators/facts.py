"""One record an operator: the facts that the estimates, the placement and the plans of recomputation read.

A reader asks `facts(node).is_cheap`. An operator without a record has the defaults; what its schema and its tags tell
(a view, a write, a random draw) is asked of the node (`graph/nodes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from torch import fx

from ort_accel.operators import flop_formulas, workspace_formulas
from ort_accel.operators.powers import is_long_power


class Repeat(Enum):
    """The searches for a plan that may compute an operator twice."""

    BASIC = "any search"
    ADVANCED = "an advanced search only"


@dataclass(frozen=True)
class Facts:
    """The facts about one operator."""

    flops: Callable[..., int] | None = None
    """Formula of the operands' shapes; None where the time goes into moving data."""
    cpu_slowdown: float = 1.0
    """The CPU's time, in multiples of the time of moving the operator's data."""
    is_product: bool = False
    """A matrix product or a convolution: views around it are no operators of their own in a plan."""
    onnx_name: str | None = None
    """Its name in a plan of recomputation: "" for no operator of its own, None for ATen's name in capitals."""
    repeat: Repeat | None = None
    """None: any search repeats it if it is a view or pointwise, otherwise an advanced one."""
    is_cheap: bool = False
    """Recomputed by default. It has to be smooth: a comparison or an index could come out as another one when a
    second kernel rounds otherwise."""
    faster_in_pytorch: str = ""
    """Times that show PyTorch's kernel for the CPU to be faster, for the report."""
    faster_in_pytorch_in_halves: str = ""
    """The same for 16-bit results only."""
    faster_in_pytorch_if: Callable[[fx.Node], bool] = lambda _: True
    """Limits `faster_in_pytorch` to some nodes."""
    ort_workspace: tuple[int, int] = (0, 0)
    """Values of the size of its result that ONNX Runtime takes before the result exists, and beside it."""
    pytorch_workspace: Callable[[fx.Node], int] | None = None
    """Bytes that PyTorch's kernel takes beside its operands and results."""
    ort_reuses_input: bool = False
    """ONNX Runtime writes its result over an input that is not read any more."""
    is_never_constant: bool = False
    """ONNX Runtime computes it in each run: it does not fold it into a constant that runs share."""
    adds_onto_first: bool = False
    """It may write its result over its first operand."""
    is_uninitialized: bool = False
    """It gives memory without values."""


_BASIC, _ADVANCED = Repeat.BASIC, Repeat.ADVANCED

_RESHAPE = Facts(onnx_name="Reshape", repeat=_BASIC)
_TRANSPOSE = Facts(onnx_name="Transpose", repeat=_BASIC)
_GATHER = Facts(onnx_name="Gather", repeat=_BASIC)
_FILL = Facts(onnx_name="ConstantOfShape", repeat=_BASIC)
_AND = Facts(onnx_name="And", repeat=_BASIC)
_UNNAMED = Facts(onnx_name="", repeat=_BASIC)
_UNINITIALIZED = Facts(is_uninitialized=True)
_CHEAP = Facts(is_cheap=True)
_PRODUCT = Facts(flop_formulas.product, is_product=True, onnx_name="MatMul", repeat=_ADVANCED)
_PRODUCT_AND_SUM = replace(_PRODUCT, flops=flop_formulas.product_and_sum, onnx_name="MatMul+Add")
_ATTENTION = Facts(onnx_name="Attention", repeat=_ADVANCED)
_FUSED_ATTENTION = replace(_ATTENTION, flops=flop_formulas.attention)
_FUSED_ATTENTION_BACKWARD = replace(_ATTENTION, flops=flop_formulas.attention_backward)

_RECORDS: dict[str, Facts] = {
    # products
    "aten.mm": replace(_PRODUCT, is_never_constant=True),
    "aten.bmm": replace(_PRODUCT, is_never_constant=True),
    "aten.addmm": replace(_PRODUCT_AND_SUM, is_never_constant=True),
    "aten.baddbmm": _PRODUCT_AND_SUM,
    "aten.linear": replace(_PRODUCT, flops=flop_formulas.linear),
    "ort_accel.linear_4bit": replace(_PRODUCT, flops=flop_formulas.linear_4bit),
    "ort_accel.linear_4bit_backward": replace(_PRODUCT, flops=flop_formulas.linear_4bit_backward),
    "ort_accel.linear_8bit": replace(_PRODUCT, flops=flop_formulas.linear),
    "ort_accel.linear_8bit_backward": replace(_PRODUCT, flops=flop_formulas.linear_backward),
    "ort_accel.linear_8bit_mixed": replace(_PRODUCT, flops=flop_formulas.linear),
    "aten.mv": Facts(flop_formulas.product),
    "aten.dot": Facts(flop_formulas.product),
    "aten.matmul": Facts(flop_formulas.product),
    "aten.addbmm": Facts(flop_formulas.product_and_sum),
    "aten.addmv": Facts(flop_formulas.product_and_sum),
    "aten._grouped_mm": Facts(flop_formulas.grouped_product),
    "transformers.grouped_mm_fallback": Facts(flop_formulas.grouped_product),
    "transformers.grouped_mm_fallback_backward": Facts(flop_formulas.grouped_product_backward),
    "aten.convolution": replace(_PRODUCT, flops=flop_formulas.convolution, onnx_name="Conv"),
    "aten.convolution_backward": Facts(flop_formulas.convolution_backward),
    # attention
    "aten.scaled_dot_product_attention": _FUSED_ATTENTION,
    "aten._scaled_dot_product_flash_attention": _FUSED_ATTENTION,
    "aten._scaled_dot_product_flash_attention_for_cpu": _FUSED_ATTENTION,
    "aten._scaled_dot_product_efficient_attention": _FUSED_ATTENTION,
    "aten._scaled_dot_product_cudnn_attention": _FUSED_ATTENTION,
    "aten._scaled_dot_product_flash_attention_backward": _FUSED_ATTENTION_BACKWARD,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _FUSED_ATTENTION_BACKWARD,
    "aten._scaled_dot_product_efficient_attention_backward": _FUSED_ATTENTION_BACKWARD,
    "aten._scaled_dot_product_cudnn_attention_backward": _FUSED_ATTENTION_BACKWARD,
    "ort_accel.scaled_dot_product_lean": replace(_FUSED_ATTENTION, pytorch_workspace=workspace_formulas.slim_attention),
    "ort_accel.scaled_dot_product_lean_backward": replace(
        _FUSED_ATTENTION_BACKWARD, pytorch_workspace=workspace_formulas.slim_attention
    ),
    "ort_accel.scaled_dot_product_of_rows": replace(
        _ATTENTION, flops=flop_formulas.packed_attention, pytorch_workspace=workspace_formulas.packed_attention
    ),
    "ort_accel.scaled_dot_product_of_rows_backward": replace(
        _ATTENTION,
        flops=flop_formulas.packed_attention_backward,
        pytorch_workspace=workspace_formulas.packed_attention_backward,
    ),
    # activations
    "aten.gelu": _CHEAP,
    "aten.silu": Facts(onnx_name="Swish", repeat=_BASIC, is_cheap=True),
    "ort_accel.gated": Facts(onnx_name="Swish+Mul", repeat=_BASIC, is_cheap=True),
    "ort_accel.gated_backward": Facts(
        faster_in_pytorch="for silu alone 0.3 ms in PyTorch, 1.6 ms in ONNX Runtime for 1024 x 1024 elements"
    ),
    "aten.sigmoid": Facts(is_cheap=True, ort_reuses_input=True),
    "aten.tanh": Facts(cpu_slowdown=5.0, ort_reuses_input=True),
    "aten.relu": Facts(ort_reuses_input=True),
    "aten.gelu_backward": Facts(faster_in_pytorch="0.8 ms in PyTorch, 6.1 ms in ONNX Runtime for 1024 x 1536 elements"),
    "aten.silu_backward": Facts(faster_in_pytorch="0.3 ms in PyTorch, 1.6 ms in ONNX Runtime for 1024 x 1024 elements"),
    "aten.threshold_backward": Facts(
        faster_in_pytorch="0.1 ms in PyTorch, 2.1 ms in ONNX Runtime for 1024 x 512 elements"
    ),
    # softmax and losses
    "aten._softmax": Facts(onnx_name="Softmax", repeat=_ADVANCED, ort_reuses_input=True),
    "aten._safe_softmax": Facts(onnx_name="Softmax", repeat=_ADVANCED, ort_workspace=(0, 2)),
    "aten._log_softmax": Facts(onnx_name="LogSoftmax", repeat=_ADVANCED, cpu_slowdown=1.5),
    "ort_accel.cross_entropy_backward": Facts(
        faster_in_pytorch="5.8 ms and one tensor in PyTorch, 9.3 ms and two in ONNX Runtime for 1024 x 4000 elements",
        ort_workspace=(0, 1),
    ),
    "ort_accel.linear_cross_entropy": replace(
        _PRODUCT,
        flops=flop_formulas.linear_cross_entropy,
        pytorch_workspace=workspace_formulas.linear_cross_entropy,
    ),
    "ort_accel.linear_token_scores": replace(
        _PRODUCT, flops=flop_formulas.linear, pytorch_workspace=workspace_formulas.linear_token_scores
    ),
    "ort_accel.linear_token_scores_backward": replace(
        _PRODUCT,
        flops=flop_formulas.linear_token_scores_backward,
        pytorch_workspace=workspace_formulas.linear_token_scores_backward,
    ),
    # norms
    "aten.native_layer_norm": Facts(onnx_name="LayerNormalization", repeat=_ADVANCED, is_cheap=True, cpu_slowdown=1.5),
    "ort_accel.rms_norm": Facts(onnx_name="SimplifiedLayerNormalization", repeat=_ADVANCED, is_cheap=True),
    "aten._fused_rms_norm": Facts(onnx_name="SimplifiedLayerNormalization", repeat=_ADVANCED, is_cheap=True),
    "aten.native_group_norm": Facts(onnx_name="GroupNormalization", repeat=_ADVANCED),
    "aten.native_batch_norm": Facts(onnx_name="BatchNormalization", repeat=_ADVANCED),
    "aten.native_layer_norm_backward": Facts(
        faster_in_pytorch="0.1 ms in PyTorch, 0.9 ms in ONNX Runtime for 1024 x 512 elements", ort_workspace=(0, 4)
    ),
    "aten.native_batch_norm_backward": Facts(
        faster_in_pytorch="1.7 ms in PyTorch, 5.6 ms in ONNX Runtime for 8 x 64 x 56 x 56 elements"
    ),
    "aten._native_batch_norm_legit_functional": Facts(
        faster_in_pytorch_in_halves=(
            "0.6 ms in PyTorch, 3.2 ms in ONNX Runtime for 8 x 64 x 56 x 56 elements in bfloat16"
        )
    ),
    # dropout, which is written as the product of a value and its mask
    "aten.native_dropout_backward": Facts(onnx_name="Dropout", repeat=_BASIC, is_cheap=True, ort_workspace=(1, 1)),
    # arithmetic
    "ort_accel.rotary": Facts(onnx_name="RotaryEmbedding", repeat=_BASIC),
    "aten.add": _CHEAP,
    "aten.sub": _CHEAP,
    "aten.mul": _CHEAP,
    "aten.div": _CHEAP,
    "aten.neg": _CHEAP,
    "aten.rsub": Facts(onnx_name="Sub", repeat=_BASIC, is_cheap=True),
    "aten.erf": Facts(cpu_slowdown=2.5),
    "aten.exp": Facts(cpu_slowdown=1.5),
    "aten.rsqrt": Facts(repeat=_ADVANCED),
    "aten.pow": Facts(
        faster_in_pytorch="0.8 ms in PyTorch, 1.7 ms in ONNX Runtime for 1024 x 512 elements",
        faster_in_pytorch_if=is_long_power,
    ),
    # comparisons and choices
    "aten.ge": Facts(onnx_name="GreaterOrEqual", repeat=_BASIC),
    "aten.gt": Facts(onnx_name="Greater", repeat=_BASIC),
    "aten.le": Facts(onnx_name="LessOrEqual", repeat=_BASIC),
    "aten.lt": Facts(onnx_name="Less", repeat=_BASIC),
    "aten.eq": Facts(onnx_name="Equal", repeat=_BASIC),
    "aten.bitwise_and": _AND,
    "aten.logical_and": _AND,
    "aten.where": Facts(ort_workspace=(0, 2)),
    "aten.masked_fill": Facts(onnx_name="Where", repeat=_BASIC, ort_workspace=(0, 2)),
    "aten.nonzero": Facts(onnx_name="NonZero", repeat=_BASIC),
    # reductions
    "aten.mean": Facts(onnx_name="ReduceMean", repeat=_ADVANCED),
    "aten.sum": Facts(onnx_name="ReduceSum", repeat=_ADVANCED),
    "aten.amax": Facts(onnx_name="ReduceMax", repeat=_ADVANCED),
    "aten.var_mean": Facts(repeat=_ADVANCED),
    "aten.cumsum": Facts(onnx_name="CumSum", repeat=_BASIC),
    # views and copies
    "aten.view": _RESHAPE,
    "aten._unsafe_view": _RESHAPE,
    "aten.reshape": _RESHAPE,
    "aten.t": _TRANSPOSE,
    "aten.permute": _TRANSPOSE,
    "aten.detach": _UNNAMED,
    "aten.alias": _UNNAMED,
    "aten.copy": _UNNAMED,
    "aten.lift_fresh_copy": _UNNAMED,
    "aten.clone": replace(_UNNAMED, is_cheap=True),
    "aten._to_copy": Facts(onnx_name="Cast", repeat=_BASIC, is_cheap=True),
    # rows, slices and padding
    "aten.select": _GATHER,
    "aten.embedding": _GATHER,
    "aten.index": _GATHER,
    "aten.index_select": _GATHER,
    "aten.gather": Facts(onnx_name="GatherElements", repeat=_BASIC),
    "aten.cat": Facts(onnx_name="Concat", repeat=_BASIC),
    "aten.repeat": Facts(onnx_name="Tile", repeat=_BASIC),
    "aten.tril": Facts(onnx_name="Trilu", repeat=_BASIC),
    "aten.triu": Facts(onnx_name="Trilu", repeat=_BASIC),
    "aten.constant_pad_nd": Facts(repeat=_BASIC),
    "aten.roll": Facts(repeat=_BASIC),
    "aten.flip": Facts(repeat=_BASIC),
    "aten.slice_backward": Facts(
        faster_in_pytorch="0.02 ms in PyTorch, 0.4 ms in ONNX Runtime for 256 x 512 of 256 x 1024 elements"
    ),
    "ort_accel.rows_of": _GATHER,
    "ort_accel.rows_into": Facts(onnx_name="Concat+Gather", repeat=_BASIC),
    "ort_accel.embedding_backward_onto": Facts(adds_onto_first=True),
    # new tensors
    "aten.arange": Facts(onnx_name="Range", repeat=_BASIC),
    "aten.full": _FILL,
    "aten.full_like": _FILL,
    "aten.new_ones": _FILL,
    "aten.zeros_like": _FILL,
    "aten.scalar_tensor": _FILL,
    "aten.empty": _UNINITIALIZED,
    "aten.empty_like": _UNINITIALIZED,
    "aten.empty_permuted": _UNINITIALIZED,
    "aten.empty_strided": _UNINITIALIZED,
}
"""By the name of an operator without its overload. Names need no import of the room or the library that defines the
operator."""

_NO_FACTS = Facts()


def facts(node: fx.Node) -> Facts:
    """Return the facts about a node's operator."""
    name = str(getattr(node.target, "overloadpacket", ""))
    return _RECORDS.get(name) or (_ATTENTION if "scaled_dot_product" in name else _NO_FACTS)
