"""Compiles a model layer by layer: each layer is a graph, and Python runs the model's code between layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ort_accel.compiler.backend import Backend
from ort_accel.compiler.module_call import Compiled, ModelCall

CACHE_ARGUMENT = "past_key_values"
"""The argument by which transformers passes the KV cache to each layer."""


def is_sharded(model: nn.Module) -> bool:
    """True if FSDP2's `fully_shard` has sharded the parameters of a model."""
    return any(map(_gathers, model.modules()))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers that a model repeats, and the other modules that multiply by weights, such as a head.

    Embeddings and lone norms run in the model's own code. If FSDP2 shards the parts of a layer separately, these parts
    are the layers.
    """
    return list(dict.fromkeys(_layers_below(model)))


def describe_layers(layers: Sequence[nn.Module]) -> str:
    """Returns the number of layers and their classes, as text."""
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
    """True if FSDP2 gathers and frees parameters around this module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes time, and a sharded model has imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _holds_products(module: nn.Module) -> bool:
    return any(_multiplies(part) for part in module.modules())


def _multiplies(module: nn.Module) -> bool:
    """True if a module multiplies by a weight of its own."""
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    # ZeRO stage 3 leaves empty parameters, whose gathered shape is in `ds_shape`.
    sizes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in module.parameters(recurse=False)]
    return not is_table and any(len(size) >= 2 for size in sizes)


class LayeredCall(ModelCall):
    """Runs a model that is compiled layer by layer. Hooks of a layer run in Python, around its graph."""

    def __init__(
        self, model: nn.Module, backend: Backend, layers: Sequence[nn.Module], undo: Callable[[], None]
    ) -> None:
        """`undo` is called when the model is restored to plain PyTorch."""
        super().__init__(model, backend)
        self._model_call: Callable[..., object] = model._call_impl
        self._layers, self._undo = tuple(layers), undo
        kinds: dict[type[nn.Module], Compiled] = {}
        for layer in self._layers:
            kind = type(layer)
            if kind not in kinds:
                kinds[kind] = Compiled(_forward_of, kind.__name__, backend)
            layer._compiled_call_impl = _LayerCall(layer, kinds[kind])

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.begin(args, kwargs)
        return self.end(self._model_call(*args, **kwargs))

    def anew(self, model: nn.Module) -> LayeredCall:
        return LayeredCall(model, self.backend, self._layers, self._undo)

    def release(self) -> None:
        super().release()
        for layer in self._layers:
            layer._compiled_call_impl = None
        self._undo()


def _forward_of(layer: nn.Module, *args: object, **kwargs: object) -> object:
    """Call the present `forward` of the layer's class."""
    return type(layer).forward(layer, *args, **kwargs)


class _LayerCall:
    """Calls a layer, hooks included, with the compiled code of its class in place of `forward`."""

    def __init__(self, layer: nn.Module, compiled: Compiled) -> None:
        self._layer, self._compiled = layer, compiled
        self._call: Callable[..., object] = layer._call_impl

    def __call__(self, *args: object, **kwargs: object) -> object:
        own = vars(self._layer)
        if "forward" in own or torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        own["forward"] = self._forward
        try:
            return self._call(*args, **kwargs)
        finally:
            del own["forward"]

    def _forward(self, *args: object, **kwargs: object) -> object:
        if torch.is_grad_enabled() and _is_empty(kwargs.get(CACHE_ARGUMENT)):
            # No script generates with gradients enabled, and a cache would prevent layers from sharing a graph.
            kwargs[CACHE_ARGUMENT] = None
        return self._compiled(self._layer, *args, **kwargs)


def _is_empty(cache: object) -> bool:
    return hasattr(cache, "get_seq_length") and not cache.get_seq_length()
