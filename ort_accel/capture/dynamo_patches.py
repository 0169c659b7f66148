"""Patches Dynamo for captures of the engine alone: what a model checks stays in a graph instead of breaking it.

Models of pictures and text check through `torch._check_tensor_all` that tokens and parts of pictures match, and write
both numbers into the error's text. Dynamo breaks the graph at the check, and compiles anew for each number in a text.
PEFT's DoRA asks which package a weight's class is of, which Dynamo does not know for classes of torch.
Gradient checkpointing in eager mode needs activations that require gradients, so hooks of transformers and PEFT, and
some models, set `requires_grad` of an activation. Dynamo breaks the graph there; in a graph it has no effect.
The hook of NEFTune reads a number from a tensor, which it need not.
Private to torch; checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import GetAttrVariable, StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ort_accel.kernels.tensor_asserts import ASSERT_FAILED

CHECKPOINTING_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""Functions of transformers and of PEFT."""
MODELS = "transformers.models."

NEFTUNE_HOOK = ("transformers.integrations.neftune", "neftune_post_forward_hook")

TENSOR_CHECKS = (torch._check_tensor_all, torch._check_tensor_all_with)

_BY_ENGINE: ContextVar[bool] = ContextVar("the engine captures", default=False)


@contextmanager
def by_engine() -> Iterator[None]:
    """Mark captures within as the engine's."""
    before = _BY_ENGINE.set(True)
    try:
        yield
    finally:
        _BY_ENGINE.reset(before)


def is_by_engine() -> bool:
    """True if the present capture is the engine's."""
    return _BY_ENGINE.get()


def _patch_text_formatting() -> None:
    """Let a dynamic size be written into a text without a guard on its value."""
    original = InstructionTranslatorBase._format_value

    def format_value(self: InstructionTranslatorBase, fmt_spec: VariableTracker, flags: int) -> None:
        if is_by_engine() and isinstance(self.stack[-1], SymNodeVariable):
            text = "{:" + fmt_spec.as_python_constant() + "}"
            self.push(StringFormatVariable.create(text, [self.pop()], {}))
        else:
            original(self, fmt_spec, flags)

    InstructionTranslatorBase._format_value = format_value  # type: ignore[method-assign]


def _patch_tensor_checks() -> None:
    """Turn a check of a tensor into an operator that the graph runs."""
    original = TorchInGraphFunctionVariable.call_function

    def call_function(
        self: TorchInGraphFunctionVariable,
        tx: InstructionTranslatorBase,
        args: list[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker:
        if not is_by_engine() or self.value not in TENSOR_CHECKS:
            return original(self, tx, args, kwargs)
        condition = signature(self.value).bind(*args, **kwargs).arguments["cond"]
        if not isinstance(condition, TensorVariable):
            return original(self, tx, args, kwargs)
        holds = condition.call_method(tx, "_is_all_true", [], {})
        tx.output.create_proxy("call_function", torch._assert_async, (holds.as_proxy(), ASSERT_FAILED), {})
        return ConstantVariable.create(None)

    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def _patch_names_of_modules() -> None:
    """Let a class of torch tell the name of the module that it is defined in."""
    original = GetAttrVariable.call_method

    def call_method(
        self: GetAttrVariable,
        tx: InstructionTranslatorBase,
        name: str,
        args: list[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker:
        owner = self.obj.value if isinstance(self.obj, TorchInGraphFunctionVariable) else None
        if not is_by_engine() or self.name != "__module__" or not isinstance(owner, type):
            return original(self, tx, name, args, kwargs)
        return ConstantVariable.create(owner.__module__).call_method(tx, name, args, kwargs)

    GetAttrVariable.call_method = call_method  # type: ignore[assignment, method-assign]


def _patch_requires_grad() -> None:
    """Leave an activation as it is where it is to require gradients for checkpointing in eager mode."""
    # torch before 2.13 has no class for `setattr` alone
    set_attribute: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
    call_method, call_function = TensorVariable.call_method, set_attribute.call_function

    def method(
        self: TensorVariable,
        tx: InstructionTranslatorBase,
        name: str,
        args: list[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker:
        if name == "requires_grad_" and _is_for_checkpointing(self, tx, [*args, *kwargs.values()]):
            return self
        return call_method(self, tx, name, args, kwargs)

    def function(
        self: Any, tx: InstructionTranslatorBase, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        if getattr(self, "fn", setattr) is setattr and len(args) == 3:
            tensor, name, value = args
            is_named = name.is_python_constant() and name.as_python_constant() == "requires_grad"
            if is_named and _is_for_checkpointing(tensor, tx, [value]):
                return ConstantVariable.create(None)
        result: VariableTracker = call_function(self, tx, args, kwargs)
        return result

    TensorVariable.call_method = method  # type: ignore[method-assign]
    set_attribute.call_function = function


def _is_for_checkpointing(
    tensor: VariableTracker, tx: InstructionTranslatorBase, values: list[VariableTracker]
) -> bool:
    """True if an activation, and no input of the graph, is to require gradients."""
    is_known = tx.f_code.co_name in CHECKPOINTING_HOOKS or str(tx.f_globals.get("__name__")).startswith(MODELS)
    is_activation = isinstance(tensor, TensorVariable) and tensor.source is None
    is_true = all(value.is_python_constant() and value.as_python_constant() is True for value in values)
    return is_by_engine() and is_known and is_activation and is_true


def _patch_neftune() -> None:
    """Let the hook that adds noise to embeddings keep the bound of the noise in a tensor."""
    original, with_noise = UserFunctionVariable.call_function, cast("FunctionType", _with_noise)

    def call_function(
        self: UserFunctionVariable,
        tx: InstructionTranslatorBase,
        args: list[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> VariableTracker:
        is_hook = (self.fn.__module__, getattr(self.fn, "__name__", "")) == NEFTUNE_HOOK
        function = UserFunctionVariable(with_noise) if is_by_engine() and is_hook else self
        return original(function, tx, args, kwargs)

    UserFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def _with_noise(module: Any, _: object, output: Tensor) -> Tensor:
    """Does what the hook does, with one rounding more."""
    if not module.training:
        return output
    width = output.new_full((), output.size(1) * output.size(2), dtype=torch.float32)
    bound: Tensor = module.neftune_noise_alpha / width.sqrt()
    return output + torch.zeros_like(output).uniform_(-1, 1) * bound


_patch_names_of_modules()
_patch_neftune()
_patch_requires_grad()
_patch_text_formatting()
_patch_tensor_checks()
