"""A model that is captured layer by layer: its own code runs in Python, and each layer in a graph of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ort_accel.compiler.backend import Backend
from ort_accel.compiler.module_call import Compiled, ModelCall

CACHE = "past_key_values"
"""The argument by which transformers hands a cache of keys and values from layer to layer."""


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` has spread the parameters of a model over the processes."""
    return any(map(_gathers, model.modules()))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats, and beside them the modules that multiply by weights (a head, say).

    What holds neither, such as an embedding or a lone normalization, is left to the model's own code. Where FSDP2
    gathers parts of a layer by themselves, those are the layers.
    """
    return list(dict.fromkeys(_layers_below(model)))


def kinds_of(layers: Sequence[nn.Module]) -> str:
    """How many layers there are, and of which kinds, for people."""
    return f"{len(layers)} layers ({', '.join(sorted({type(layer).__name__ for layer in layers}))})"


def _layers_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        repeats = isinstance(module, nn.ModuleList | nn.ModuleDict)
        holds_layers = any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in child.modules())
        is_divided = any(_gathers(part) for part in child.modules() if part is not child)
        if (repeats or not holds_layers) and not is_divided:
            if _holds_products(child):
                yield child
        else:
            yield from _layers_below(child)


def _gathers(module: nn.Module) -> bool:
    """Whether FSDP2 gathers and frees parameters around this module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # its import takes time, and whoever shards has done it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _holds_products(module: nn.Module) -> bool:
    return any(_multiplies(part) for part in module.modules())


def _multiplies(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight of its own."""
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    # The shape under ZeRO stage 3 is that of what is gathered; an empty parameter says nothing.
    sizes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in module.parameters(recurse=False)]
    return not is_table and any(len(size) >= 2 for size in sizes)


class LayeredCall(ModelCall):
    """Runs a model whose layers are captured one by one. Hooks of a layer run in Python, around its graph."""

    def __init__(
        self, model: nn.Module, backend: Backend, layers: Sequence[nn.Module], undo: Callable[[], None]
    ) -> None:
        """`undo` is called when the model is to be plain PyTorch again."""
        super().__init__(model, backend)
        self._model_call: Callable[..., Any] = model._call_impl
        self._layers, self._undo = tuple(layers), undo
        kinds: dict[type[nn.Module], Compiled] = {}
        for layer in self._layers:
            kind = type(layer)
            if kind not in kinds:
                kinds[kind] = Compiled(_forward_of, kind.__name__, backend)
            layer._compiled_call_impl = _LayerCall(layer, kinds[kind])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begin(args, kwargs)
        return self.end(self._model_call(*args, **kwargs))

    def anew(self, model: nn.Module) -> LayeredCall:
        return LayeredCall(model, self.backend, self._layers, self._undo)

    def release(self) -> None:
        super().release()
        for layer in self._layers:
            layer._compiled_call_impl = None
        self._undo()


def _forward_of(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the `forward` that the layer's class has now."""
    return type(layer).forward(layer, *args, **kwargs)


class _LayerCall:
    """Calls a layer as ever, with the compiled code of its kind in the place of its `forward`."""

    def __init__(self, layer: nn.Module, compiled: Compiled) -> None:
        self._layer, self._compiled = layer, compiled
        self._call: Callable[..., Any] = layer._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self._layer)
        if "forward" in own or torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        own["forward"] = self._forward
        try:
            return self._call(*args, **kwargs)
        finally:
            del own["forward"]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and _is_empty(kwargs.get(CACHE)):
            # Nobody generates while gradients are taken, and a cache would make each layer's graph one of its own.
            kwargs[CACHE] = None
        return self._compiled(self._layer, *args, **kwargs)


def _is_empty(cache: Any) -> bool:
    return hasattr(cache, "get_seq_length") and not cache.get_seq_length()
