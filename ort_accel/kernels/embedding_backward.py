"""The gradient of a large embedding, in memory of ONNX Runtime's pool.

Zeros for 30,522 words and a width of 384, 45 MiB, took 30 to 80 ms on a virtual machine, most of that for pages from
the system. In the pool's memory, which stays, they took 2.3 ms. Smaller ones lie where other tensors can come after
them: in the pool those of 8,000 words, 12 MiB, were in use throughout the next step, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ort_accel.kernels.output_buffers import LARGE
from ort_accel.runtime.ort_pool import pooled_zeros

aten = torch.ops.aten


def embedding_gradient(grad: Tensor, indices: Tensor, count: int, padding: int, by_frequency: bool) -> Tensor:
    """What `aten.embedding_dense_backward` gives, bit for bit: it adds up the rows that occur, in the same order."""
    width = grad.shape[-1]
    is_large = count * width * grad.itemsize >= LARGE
    if not is_large or by_frequency or not grad.is_cpu or grad.dtype != torch.float32 or not grad.numel():
        return aten.embedding_dense_backward.default(grad, indices, count, padding, by_frequency)  # type: ignore[no-any-return]
    whole = pooled_zeros((count, width))
    rows, numbers = torch.unique(indices.reshape(-1), return_inverse=True)
    whole[rows] = aten.embedding_dense_backward.default(grad.reshape(-1, width), numbers, len(rows), -1, False)
    if 0 <= padding < count:
        whole[padding] = 0
    return whole
