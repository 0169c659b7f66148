"""Captures chosen `torch.autograd.Function`s as plain operators that were registered in their place.

Dynamo breaks the graph at a function that works on memory of its own, or in steps that a graph cannot hold. Besides, no
row can be skipped through a backward that is not in the graph. Private to torch; checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch.autograd import Function

from ort_accel.capture.dynamo_patches import is_by_engine

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


@dataclass(frozen=True)
class Replacement:
    """An autograd function as operators."""

    operators: Callable[..., Any]
    """Takes the function's arguments; gives its results, and gradients by autograd."""
    suits: Callable[[Sequence[Any]], bool]
    """True if the operators are to be used for these arguments; tensors are fake, unknown arguments are None."""


_REPLACEMENTS: dict[type[Function], Replacement] = {}


def capture_as_operators(function: type[Function], written: Replacement) -> None:
    """Capture a function as these operators from now on."""
    _REPLACEMENTS[function] = written


def _value(argument: VariableTracker) -> Any:
    if argument.is_python_constant():
        return argument.as_python_constant()
    try:
        return argument.as_proxy().node.meta.get("example_value")
    except NotImplementedError:
        return None


def _patch_calls() -> None:
    original = AutogradFunctionVariable.call_apply

    def call_apply(
        self: AutogradFunctionVariable,
        tx: InstructionTranslatorBase,
        args: list[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker:
        written = _REPLACEMENTS.get(self.fn_cls) if is_by_engine() and not kwargs else None
        if written is None or not written.suits([_value(argument) for argument in args]):
            return original(self, tx, args, kwargs)
        return UserFunctionVariable(cast("FunctionType", written.operators)).call_function(tx, list(args), {})

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]


_patch_calls()
