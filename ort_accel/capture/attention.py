"""`compute.attention`: which way of computing attention PyTorch writes into the graph while it is captured."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

WAYS = {
    "fused": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "products": [SDPBackend.MATH],
}


def attention_as(wish: str) -> AbstractContextManager[None]:
    """While this is entered, captured attention is written as wished. `auto` leaves the choice to PyTorch.

    A fused kernel stays one node, in both directions, which PyTorch runs; products become products in ONNX Runtime. A
    kernel that was named and cannot run here (with dropout on CPU, say) is an error of PyTorch, which says so.
    """
    return sdpa_kernel(WAYS[wish]) if wish in WAYS else nullcontext()
