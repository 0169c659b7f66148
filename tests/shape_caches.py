"""The caches in which PyTorch keeps shapes of earlier traces."""

from torch.fx.experimental.symbolic_shapes import ShapeEnv


def clear_shape_caches() -> None:
    """Clears the caches of `ShapeEnv`'s methods, which hold hundreds of traces that nothing else holds."""
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()
