"""Outputs of a model that are computed at their first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._functorch import utils as functorch_utils
from torch.utils import _pytree as pytree

TorchFunction = Callable[..., Any]


class LazyTensor(Tensor):
    """An output that is not computed yet. It knows its size, type and device, and computes its values at first use.

    Metadata, `detach` and casts to float types compute nothing, since libraries apply these to outputs that nobody
    reads. It has no `grad_fn` until it is computed, so that DDP, which asks every output for its own, ignores it. Every
    other operation runs on the computed tensor.
    """

    _compute: Callable[[], Tensor] | None
    _value: Tensor | None
    _has_gradient: bool
    _casts: list[ref[LazyTensor]]
    """Lazy casts of it, which are computed with it, since it may be written to afterwards."""

    @staticmethod
    def __new__(
        cls,
        size: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        compute: Callable[[], Tensor],
        *,
        requires_grad: bool = False,
    ) -> LazyTensor:
        """Returns a lazy tensor. `compute` is called at most once, and dropped then.

        Its result has this size, type and device, and a gradient if `requires_grad` is true.
        """
        lazy: LazyTensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device, requires_grad=False)
        lazy._compute, lazy._value, lazy._has_gradient = compute, None, requires_grad
        lazy._casts = []
        return lazy

    def read(self) -> Tensor:
        """Returns the computed tensor."""
        if self._value is None:
            assert self._compute is not None
            self._value, self._compute = self._compute(), None
            casts, self._casts = self._casts, []
            for weak in casts:
                if (cast := weak()) is not None:
                    cast.read()
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _REQUIRES_GRAD:
            return args[0]._has_gradient
        if func == _GRAD_FN and args[0]._value is None:
            return None
        if func in _CASTS and len(args) == 1 and not kwargs and args[0]._value is None:
            return _cast(args[0], func, _CASTS[func])
        if func not in _METADATA_FUNCTIONS:
            args, kwargs = compute_all((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves it untyped
        cls, func: TorchFunction, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator that C++ calls below autograd; calls from Python go through `__torch_function__`."""
        args, kwargs = compute_all((args, kwargs))
        return func(*args, **(kwargs or {}))


def compute_all(values: Any) -> Any:
    """Returns the same structure with each lazy tensor computed."""
    return pytree.tree_map_only(LazyTensor, LazyTensor.read, values)


def _inputs_of_function(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the inputs of an `autograd.Function`: they pass by `__torch_function__`, and lazy ones have no graph."""
    return _unwrapped(compute_all(args) if any(isinstance(item, LazyTensor) for item in args) else args)


_unwrapped = functorch_utils.unwrap_dead_wrappers
functorch_utils.unwrap_dead_wrappers = _inputs_of_function  # `Function.apply` calls it for all inputs


def _cast(lazy: LazyTensor, cast: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> LazyTensor:
    has_gradient = lazy._has_gradient and cast is not Tensor.detach
    compute = partial(_apply, cast, lazy)
    result = LazyTensor(lazy.shape, dtype or lazy.dtype, lazy.device, compute, requires_grad=has_gradient)
    lazy._casts.append(ref(result))
    return result


def _apply(cast: Callable[[Tensor], Tensor], lazy: LazyTensor) -> Tensor:
    return cast(lazy.read())


_CASTS: dict[TorchFunction, torch.dtype | None] = {
    Tensor.detach: None,
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}

_PROPERTIES = [
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "itemsize",
    "nbytes",
    "is_sparse",
    "is_nested",
    "is_quantized",
    "is_cpu",
    "is_cuda",
    "is_meta",
    "is_mps",
    "is_xla",
    "is_mkldnn",
    "requires_grad",
]


def _getter(name: str) -> TorchFunction:
    """Returns the function that `__torch_function__` gets for a property."""
    getter: TorchFunction = getattr(Tensor, name).__get__
    return getter


_GETTERS = {name: _getter(name) for name in _PROPERTIES}

_REQUIRES_GRAD, _GRAD_FN = _GETTERS["requires_grad"], _getter("grad_fn")

_METADATA_FUNCTIONS: frozenset[TorchFunction] = frozenset(
    {
        *_GETTERS.values(),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size, Tensor.__len__, torch.numel),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    }
)
