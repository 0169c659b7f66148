"""What AOTAutograd makes of a graph, as an object that can be kept and made to run again.

AOTAutograd's own cache does that for compilers whose results it knows. Here it is made to believe in ours, without its
files. It uses what is private to torch; checked with torch 2.13, and read in 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_settings
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._functorch._aot_autograd.schemas import AOTAutogradCacheInfo
from torch._inductor.output_code import OutputCode

from ort_accel.executor.program import Program


@dataclass
class ProgramCode(OutputCode):
    """A program as AOTAutograd's cache takes it."""

    program: Program

    def __post_init__(self) -> None:
        self._boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run it."""
        return self.program(inputs)  # type: ignore[arg-type]

    def post_compile(self, *_: Any, **__: Any) -> None:
        """It runs as it is."""

    def prepare_for_serialization(self) -> None:
        """It is kept as it is."""

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """It has none."""


def has_records() -> bool:
    """True if this version of torch has all that AOTAutograd's records are taken with."""
    names = (aot_autograd, "create_aot_state"), (AOTAutogradCache, "save"), (graph_compile, "serialize_graph_module")
    return all(hasattr(owner, name) for owner, name in names) and hasattr(functorch_settings, "bundled_autograd_cache")


@contextmanager
def results_can_be_kept() -> Iterator[None]:
    """AOTAutograd notes what it made while this is entered, and writes no file."""
    create = aot_autograd.create_aot_state

    def noting(*args: Any, **kwargs: Any) -> Any:
        state = create(*args, **kwargs)
        state.aot_config = replace(state.aot_config, cache_info=AOTAutogradCacheInfo("", 0, forward_symints=[]))
        return state

    with ExitStack() as stack:
        stack.enter_context(functorch_settings.patch(bundled_autograd_cache=True))
        stack.enter_context(patch.object(aot_autograd, "create_aot_state", noting))
        stack.enter_context(patch.object(AOTAutogradCache, "save", lambda *_, **__: None))
        stack.enter_context(patch.object(graph_compile, "serialize_graph_module", lambda _: None))
        yield


class AotResult:
    """A compiled graph. Kept, it is AOTAutograd's record of it; what comes back is made from that."""

    def __init__(self, run: Callable[..., Any], record: Any, lifted: Sequence[torch.Tensor]) -> None:
        """`lifted` are tensors of the graph itself, which AOTAutograd puts in front of the inputs."""
        self._run, self._record, self._lifted = run, record, lifted

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        return self._run(*inputs)

    def __reduce__(self) -> Any:
        if self._record is None:
            raise TypeError("AOTAutograd left no record of what it made of a graph")
        return _again, (self._record, list(self._lifted))


def result_of(run: Callable[..., Any], module: torch.fx.GraphModule) -> AotResult:
    """What AOTAutograd gave for a module while results could be kept."""
    serialize = getattr(run, "serialize", None)
    held = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    lifted = list(dict(held).values())
    return AotResult(run, serialize() if serialize is not None else None, lifted)


def _again(record: Any, lifted: list[torch.Tensor]) -> AotResult:
    compiled = record.wrap_post_compile([], record.sanitized_aot_config, {})

    def run(*inputs: Any) -> Any:
        return compiled([*lifted, *inputs])

    return AotResult(torch._dynamo.disable(run), record, lifted)  # type: ignore[no-untyped-call]
