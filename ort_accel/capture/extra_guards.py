"""Guards for changes that Dynamo's own guards overlook: patched methods, hooks on all modules, keys that appear.

Dynamo does not guard the methods that it inlines, the hooks of `torch.nn.modules.module`, and that a key is missing
where `d[key]` raised. It uses what is private to torch; checked with torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._guards import Guard, TracingContext

CALLED = ("__call__", "_call_impl", "forward")
"""Methods of each module. Dynamo goes to `forward` at once, without guards that the others are still nn.Module's."""

ON_ALL_MODULES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)

_CODE = attrgetter("__code__")


def guard_overlooked(graph: fx.Graph) -> None:
    """Let what is being compiled be compiled anew when methods that it inlined, or hooks on all modules, change."""
    context = TracingContext.try_get()
    if context is not None:
        create = partial(_create, of_tensors=_methods_called(graph), traced=frozenset(context.traced_code))
        context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(create))


@contextmanager
def as_captured(graph: fx.Graph) -> Iterator[None]:
    """While this is entered, `torch.nn.functional` has the functions that a graph calls under their own names.

    Dynamo has followed a function that somebody put around one of them, so the graph has what that one does. Tracing
    finds a function by its name where it has overrides, and would do the same a second time.
    """
    if covered := sorted(filter(_is_covered, _methods_called(graph))):
        raise NotImplementedError(f"torch.Tensor.{covered[0]} was replaced, and tracing would call the other one twice")
    targets = {node.target for node in graph.nodes if isinstance(node.target, FunctionType)}
    own = {each.__name__: each for each in targets if each.__module__ == F.__name__}
    around = {name: vars(F)[name] for name, each in own.items() if vars(F).get(name, each) is not each}
    vars(F).update({name: own[name] for name in around})
    try:
        yield
    finally:
        vars(F).update(around)


def _methods_called(graph: fx.Graph) -> frozenset[str]:
    return frozenset(str(node.target) for node in graph.find_nodes(op="call_method"))


def _is_covered(name: str) -> bool:
    """True if somebody has put a method into `torch.Tensor` where one of torch's library in C would be found."""
    if (found := vars(Tensor).get(name)) is None or not hasattr(torch._C.TensorBase, name):
        return False
    is_own = getattr(found, "__module__", None) == torch._tensor.__name__
    return not is_own and found is not getattr(torch._C.TensorBase, name)  # `detach` is C's own, with a docstring


def _create(builder: GuardBuilder, guard: Guard, of_tensors: frozenset[str], traced: frozenset[CodeType]) -> None:
    """Add the guards of one compiled frame."""
    assert builder.check_fn_manager.output_graph is not None
    objects = [builder.get(each) for each in builder.check_fn_manager.output_graph.guards if each.name]
    found = {each if isinstance(each, type) else type(each) for each in objects}
    names = {base: _inlined(base, traced) for each in found for base in each.__mro__}
    names[Tensor] = of_tensors
    getters = [(owner, attrgetter(*methods)) for owner, methods in names.items() if methods]

    def state() -> tuple[Any, ...]:
        hooks = [list(getattr(nn.modules.module, name).values()) for name in ON_ALL_MODULES]
        return [get(owner) for owner, get in getters], list(map(_CODE, functions)), hooks

    functions = [value for owner, methods in names.items() for value in _functions(owner, methods)]
    captured = state()

    def is_unchanged(_: object) -> bool:
        try:
            return state() == captured
        except AttributeError:  # a method is gone
            return False

    said = f"{len(functions)} inlined methods, and the hooks on all modules, are unchanged"
    builder.guard_manager.root.add_lambda_guard(is_unchanged, [said], guard.user_stack)


def _inlined(owner: type, traced: frozenset[CodeType]) -> frozenset[str]:
    """Names of the methods that a class has or inherits and Dynamo inlined, or left out on the way to `forward`."""
    members = [member for base in owner.__mro__ for member in list(vars(base).items())]
    inlined = {name for name, value in members if getattr(_function(value), "__code__", None) in traced}
    return frozenset(inlined.union(CALLED) if issubclass(owner, nn.Module) else inlined)


def _functions(owner: type, names: Iterable[str]) -> Iterator[FunctionType]:
    """The Python functions of these names, whose code can be changed in place."""
    for name in names:
        if isinstance(function := _function(getattr(owner, name)), FunctionType):
            yield function


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _guard_missing_keys() -> None:
    usual = ConstDictVariable.getitem_const_raise_exception_if_absent

    def getitem(self: ConstDictVariable, tx: Any, arg: Any) -> Any:
        if arg not in self:
            self.install_dict_contains_guard(tx, [arg])
        return usual(self, tx, arg)

    ConstDictVariable.getitem_const_raise_exception_if_absent = getitem  # type: ignore[method-assign]


_guard_missing_keys()
