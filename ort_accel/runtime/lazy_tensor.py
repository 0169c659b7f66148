"""Outputs that are computed when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class UnreadTensor(Tensor):
    """Stands for an output that was not computed: it knows its form, and computes itself at the first use.

    Asking for its size, type or device, detaching and casting it to another float type compute nothing, since
    libraries do so with outputs that nobody looks at. Until it is computed it has no `grad_fn`: DDP, which asks all
    outputs for theirs, then leaves it as it is. Whatever else is done with it is done with the true tensor.
    """

    _compute: Callable[[], Tensor] | None
    _value: Tensor | None
    _has_gradient: bool
    _casts: list[ref[UnreadTensor]]
    """They are computed together with it, as it may be written to from then on."""

    @staticmethod
    def __new__(
        cls,
        size: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        compute: Callable[[], Tensor],
        *,
        requires_grad: bool = False,
    ) -> UnreadTensor:
        """`compute` is called once at most, and not kept after that; its tensor has the size, type and device that are
        given here, and gradients if `requires_grad` says so."""
        unread: UnreadTensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device, requires_grad=False)
        unread._compute, unread._value, unread._has_gradient = compute, None, requires_grad
        unread._casts = []
        return unread

    def read(self) -> Tensor:
        """The true tensor."""
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
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _REQUIRES_GRAD:
            return args[0]._has_gradient
        if func == _GRAD_FN and args[0]._value is None:
            return None
        if func in _CASTS and len(args) == 1 and not kwargs and args[0]._value is None:
            return _cast(args[0], func, _CASTS[func])
        if func not in _OF_THE_FORM:
            args, kwargs = read_all((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves it untyped
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Reached by C++ alone, where gradients are no longer recorded: Python's calls go by `__torch_function__`."""
        args, kwargs = read_all((args, kwargs))
        return func(*args, **(kwargs or {}))


def read_all(values: Any) -> Any:
    """The same structure with the true tensor for every unread one."""
    return pytree.tree_map_only(UnreadTensor, lambda unread: unread.read(), values)


def _cast(unread: UnreadTensor, cast: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> UnreadTensor:
    has_gradient = unread._has_gradient and cast is not Tensor.detach
    compute = partial(_apply, cast, unread)
    result = UnreadTensor(unread.shape, dtype or unread.dtype, unread.device, compute, requires_grad=has_gradient)
    unread._casts.append(ref(result))
    return result


def _apply(cast: Callable[[Tensor], Tensor], unread: UnreadTensor) -> Tensor:
    return cast(unread.read())


_CASTS: dict[Callable[..., Any], torch.dtype | None] = {
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


def _getter(name: str) -> Callable[..., Any]:
    """What `__torch_function__` is given where a property is asked for."""
    getter: Callable[..., Any] = getattr(Tensor, name).__get__
    return getter


_GETTERS = {name: _getter(name) for name in _PROPERTIES}

_REQUIRES_GRAD, _GRAD_FN = _GETTERS["requires_grad"], _getter("grad_fn")

_OF_THE_FORM: frozenset[Callable[..., Any]] = frozenset(
    {
        *_GETTERS.values(),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size, Tensor.__len__, torch.numel),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    }
)
