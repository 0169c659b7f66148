"""Functions with a backward of their own that the engine captures as plain operators, as somebody wrote them for it.

Where such a function works on memory that it makes, or in steps that a graph cannot hold, Dynamo divides the graph at
it; and no row is left out through a backward that is not seen. It uses what is private to torch; checked with torch
2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch.autograd import Function

from ort_accel.capture.engine_only import is_by_engine


@dataclass(frozen=True)
class Written:
    """A function as operators."""

    operators: Callable[..., Any]
    """Takes the same arguments, and gives the same results and gradients."""
    suits: Callable[[Sequence[Any]], bool]
    """Asked, with the arguments, whether it is to be used; tensors are fake, and what is not known is None."""


_WRITTEN: dict[type[Function], Written] = {}


def write_out(function: type[Function], written: Written) -> None:
    """Use this in place of a function in what is captured from now on."""
    _WRITTEN[function] = written


def _value(argument: VariableTracker) -> Any:
    if argument.is_python_constant():
        return argument.as_python_constant()
    try:
        return argument.as_proxy().node.meta.get("example_value")
    except NotImplementedError:
        return None


def _change_calls() -> None:
    usual = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        written = _WRITTEN.get(self.fn_cls) if is_by_engine() and not kwargs else None
        if written is None or not written.suits([_value(argument) for argument in args]):
            return usual(self, tx, args, kwargs)
        return UserFunctionVariable(cast("FunctionType", written.operators)).call_function(tx, list(args), {})

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]


_change_calls()
