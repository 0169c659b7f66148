"""Checks of what tensors hold stay in a graph, where Dynamo itself would divide it.

Models of pictures and text check that there are as many tokens for pictures as there are parts of pictures, through
`torch._check_tensor_all`, and write both numbers into the text of the error. Dynamo divides a graph at the check, and
compiles anew for each number that was written into a text. Both are changed for what the engine captures, and for
nothing else. It uses what is private to torch; checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ort_accel.capture.engine_only import is_by_engine
from ort_accel.kernels.tensor_asserts import FAILED

CHECKS = (torch._check_tensor_all, torch._check_tensor_all_with)
"""How models check what a tensor holds."""


def _change_texts() -> None:
    """Let a size that may change be written into a text without being taken for fixed."""
    usual = InstructionTranslatorBase._format_value

    def format_value(self: Any, form: Any, flags: int) -> None:
        if is_by_engine() and isinstance(self.stack[-1], SymNodeVariable):
            text = "{:" + form.as_python_constant() + "}"
            self.push(StringFormatVariable.create(text, [self.pop()], {}))
        else:
            usual(self, form, flags)

    InstructionTranslatorBase._format_value = format_value  # type: ignore[assignment, method-assign]


def _change_checks() -> None:
    """Take what is checked of a tensor as given, and let the graph see to it when it runs."""
    usual = TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not is_by_engine() or self.value not in CHECKS:
            return usual(self, tx, args, kwargs)
        condition = signature(self.value).bind(*args, **kwargs).arguments["cond"]
        if not isinstance(condition, TensorVariable):
            return usual(self, tx, args, kwargs)
        holds = condition.call_method(tx, "_is_all_true", [], {})
        tx.output.create_proxy("call_function", torch._assert_async, (holds.as_proxy(), FAILED), {})
        return ConstantVariable.create(None)

    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]


_change_texts()
_change_checks()
