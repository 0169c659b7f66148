"""`compute.attention`: which way of computing attention PyTorch writes into the graph while it is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

from ort_accel.errors import OrtAccelError, first_line

WAYS = {
    "fused": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "products": [SDPBackend.MATH],
}


@contextmanager
def attention_as(wish: str) -> Iterator[None]:
    """While this is entered, captured attention is written as wished. `auto` leaves the choice to PyTorch.

    A fused kernel stays one node, in both directions, which PyTorch runs; products become products in ONNX Runtime. A
    kernel that was named and cannot run here (with dropout on CPU, say) is an error.
    """
    if wish not in WAYS:
        yield
        return
    try:
        with sdpa_kernel(WAYS[wish]):
            yield
    except RuntimeError as error:
        if "No viable backend" not in str(error):
            raise
        raise OrtAccelError(
            f"compute.attention is {wish}, which PyTorch cannot run here: {first_line(error)}; set it to auto"
        ) from error
