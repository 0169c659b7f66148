"""Copies of PyTorch's operators that take each number with its type, since the C interface passes no untyped numbers.

`aten.add.Tensor`, whose `alpha` is a number of any type, becomes `ort_accel_numbers.aten__add__Tensor__float` where alpha
is a real number. The name says how the operator is defined, so that another process can define it again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.library import Library

from ort_accel.kernels.library import ANY_DEVICE

NAMESPACE = "ort_accel_numbers"

_LIBRARY = Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def name_of(target: OpOverload[..., Any], types: Sequence[str]) -> str:
    """Returns the name of an operator's copy whose numbers have these types: `float`, `int` or `bool`."""
    namespace, _, name = target._schema.name.partition("::")
    return "__".join([namespace, name, target._schema.overload_name or "default", *types])


@cache
def define(name: str) -> None:
    """Defines the copy with this name."""
    namespace, operator, overload, *types = re.split(r"(?<=[a-zA-Z0-9])__(?=[a-zA-Z0-9_])", name)
    target = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    remaining = iter(types)
    arguments = str(target._schema).partition("(")[2]
    typed = re.sub(r"\bScalar\b", lambda _: next(remaining), re.sub(r"=[^,()]*(\([^)]*\))?(?=[,)])", "", arguments))
    _LIBRARY.define(f"{name}({typed}")  # type: ignore[no-untyped-call]
    positional = [argument for argument in target._schema.arguments if not argument.kwarg_only]
    names = [argument.name for argument in target._schema.arguments if argument.kwarg_only]

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args[: len(positional)], **dict(zip(names, args[len(positional) :], strict=False)), **kwargs)

    _LIBRARY.impl(name, call, ANY_DEVICE)  # type: ignore[no-untyped-call]
