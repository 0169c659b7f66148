"""Chooses the backend of scaled dot-product attention that PyTorch captures (`compute.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

from ort_accel.errors import OrtAccelError, first_line

BACKENDS = {
    "fused": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "products": [SDPBackend.MATH],
}


@contextmanager
def attention_backend(wish: str) -> Iterator[None]:
    """Capture attention with the backend of this name. `auto` leaves the choice to PyTorch.

    A fused kernel stays one node in forward and backward, which PyTorch runs; `products` become matrix products in ONNX
    Runtime. A named backend that cannot run here, such as one with dropout on the CPU, is an error.
    """
    if wish not in BACKENDS:
        yield
        return
    try:
        with sdpa_kernel(BACKENDS[wish]):
            yield
    except RuntimeError as error:
        if "No viable backend" not in str(error):
            raise
        raise OrtAccelError(
            f"compute.attention is {wish}, which PyTorch cannot run here: {first_line(error)}; set it to auto"
        ) from error
