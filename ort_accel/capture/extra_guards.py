"""Adds guards for changes that Dynamo's own guards overlook: patched methods, hooks on all modules, keys that appear.

Dynamo guards neither the methods that it inlines, nor the hooks of `torch.nn.modules.module`, nor the absence of a key
where `d[key]` raised. Private to torch; checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._guards import Guard, TracingContext

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

CALL_METHODS = ("__call__", "_call_impl", "forward")
"""Methods that run in a module's call. Dynamo goes to `forward` at once, and guards none of the others."""

GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)

_CODE = attrgetter("__code__")


def add_extra_guards(graph: fx.Graph) -> None:
    """Recompile what is being compiled when methods that it inlined, or hooks on all modules, change."""
    context = TracingContext.try_get()
    if context is not None:
        create = partial(_create, of_tensors=_methods_called(graph), traced=frozenset(context.traced_code))
        context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(create))


@contextmanager
def original_functions(graph: fx.Graph) -> Iterator[None]:
    """Put the original functions back into `torch.nn.functional` while a graph that calls them is traced.

    Dynamo has inlined a wrapper that somebody put around such a function, so the graph has its operators already.
    Tracing looks the function up by name if it has overrides, and would run the wrapper a second time.
    """
    if replaced := sorted(filter(_is_replaced, _methods_called(graph))):
        raise NotImplementedError(f"torch.Tensor.{replaced[0]} was replaced, and tracing would call the new one twice")
    targets = {node.target for node in graph.nodes if isinstance(node.target, FunctionType)}
    originals = {each.__name__: each for each in targets if each.__module__ == F.__name__}
    wrappers = {name: vars(F)[name] for name, each in originals.items() if vars(F).get(name, each) is not each}
    vars(F).update({name: originals[name] for name in wrappers})
    try:
        yield
    finally:
        vars(F).update(wrappers)


def _methods_called(graph: fx.Graph) -> frozenset[str]:
    return frozenset(str(node.target) for node in graph.find_nodes(op="call_method"))


def _is_replaced(name: str) -> bool:
    """True if somebody has put a method into `torch.Tensor` that hides one of torch's C library."""
    if (found := vars(Tensor).get(name)) is None or not hasattr(torch._C.TensorBase, name):
        return False
    is_own = getattr(found, "__module__", None) == torch._tensor.__name__
    return not is_own and found is not getattr(torch._C.TensorBase, name)  # `detach` is C's own, with a docstring


def _create(builder: GuardBuilder, guard: Guard, of_tensors: frozenset[str], traced: frozenset[CodeType]) -> None:
    """Add the guard of one compiled frame: the methods of its objects' classes, their code, and the hooks."""
    assert builder.check_fn_manager.output_graph is not None
    objects = _guarded(builder, builder.check_fn_manager.output_graph.guards)
    classes = {each if isinstance(each, type) else type(each) for each in objects}
    names = {base: _inlined(base, traced) for each in classes for base in each.__mro__}
    names[Tensor] = of_tensors
    getters = [(owner, attrgetter(*methods)) for owner, methods in names.items() if methods]

    def state() -> tuple[object, ...]:
        hooks = [list(getattr(nn.modules.module, name).values()) for name in GLOBAL_HOOKS]
        return [get(owner) for owner, get in getters], list(map(_CODE, functions)), hooks

    functions = [value for owner, methods in names.items() for value in _functions(owner, methods)]
    captured = state()

    def is_unchanged(_: object) -> bool:
        try:
            return state() == captured
        except AttributeError:  # a method is gone
            return False

    text = f"{len(functions)} inlined methods, and the hooks on all modules, are unchanged"
    builder.guard_manager.root.add_lambda_guard(is_unchanged, [text], guard.user_stack)


def _guarded(builder: GuardBuilder, guards: Iterable[Guard]) -> Iterator[object]:
    """Yield the objects that guards name."""
    for each in guards:
        if each.name:
            try:
                yield builder.get(each)
            except AttributeError:  # before torch 2.13, a guard on the absence of an attribute names that attribute
                continue


def _inlined(owner: type, traced: frozenset[CodeType]) -> frozenset[str]:
    """Return the names of a class's methods, inherited ones included, that Dynamo inlined or skipped."""
    members = [member for base in owner.__mro__ for member in list(vars(base).items())]
    inlined = {name for name, value in members if getattr(_function(value), "__code__", None) in traced}
    return frozenset(inlined.union(CALL_METHODS) if issubclass(owner, nn.Module) else inlined)


def _functions(owner: type, names: Iterable[str]) -> Iterator[FunctionType]:
    """Yield the Python functions of these names, whose code can be changed in place."""
    for name in names:
        if isinstance(function := _function(getattr(owner, name)), FunctionType):
            yield function


def _function(method: object) -> object:
    return getattr(method, "__func__", method)


def _patch_missing_keys() -> None:
    original = ConstDictVariable.getitem_const_raise_exception_if_absent

    def getitem(self: ConstDictVariable, tx: InstructionTranslatorBase, arg: VariableTracker) -> VariableTracker:
        if arg not in self:
            self.install_dict_contains_guard(tx, [arg])
        return original(self, tx, arg)

    ConstDictVariable.getitem_const_raise_exception_if_absent = getitem  # type: ignore[method-assign]


_patch_missing_keys()
