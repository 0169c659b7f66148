"""The gradient of a large embedding, in memory of ONNX Runtime's pool.

The system maps pages for new memory of that size in each step; the pool keeps them. Smaller gradients stay out of the
pool, since their blocks would hold memory that other tensors can use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ort_accel.kernels.output_buffers import POOL_LEAST_BYTES
from ort_accel.runtime.ort_pool import pooled_zeros

aten = torch.ops.aten


def embedding_gradient(grad: Tensor, indices: Tensor, count: int, padding: int, by_frequency: bool) -> Tensor:
    """Return the bits of `aten.embedding_dense_backward`: the rows that occur are added up in the same order."""
    width = grad.shape[-1]
    is_large = count * width * grad.itemsize >= POOL_LEAST_BYTES
    if not is_large or by_frequency or not grad.is_cpu or grad.dtype != torch.float32 or not grad.numel():
        return aten.embedding_dense_backward.default(grad, indices, count, padding, by_frequency)  # type: ignore[no-any-return]
    whole = pooled_zeros((count, width))
    rows, numbers = torch.unique(indices.reshape(-1), return_inverse=True)
    whole[rows] = aten.embedding_dense_backward.default(grad.reshape(-1, width), numbers, len(rows), -1, False)
    if 0 <= padding < count:
        whole[padding] = 0
    return whole
