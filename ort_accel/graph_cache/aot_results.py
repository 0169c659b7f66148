"""Makes AOTAutograd's result for a graph an object that can be stored and loaded.

AOTAutograd's own cache does so for compilers whose results it knows. Here it takes ours for one, and writes no files.
Private to torch; checked with torch 2.13, and read in 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_settings
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._functorch._aot_autograd.schemas import AOTAutogradCacheInfo
from torch._inductor.output_code import OutputCode

from ort_accel.executor.program import Program

if TYPE_CHECKING:
    from torch._functorch._aot_autograd.aot_autograd_result import BundledAOTAutogradResult

    Record = BundledAOTAutogradResult["ProgramCode"]


@dataclass
class ProgramCode(OutputCode):
    """A program in the form that AOTAutograd's cache accepts."""

    program: Program

    def __post_init__(self) -> None:
        self._boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the program."""
        return self.program(inputs)  # type: ignore[arg-type]

    def post_compile(self, *_: object, **__: object) -> None:
        """Do nothing: the program is ready to run."""

    def prepare_for_serialization(self) -> None:
        """Do nothing: the program is stored as it is."""

    def set_triton_bundle(self, triton_bundle: object) -> None:
        """Do nothing: the program has no Triton kernels."""


def has_records() -> bool:
    """True if this version of torch has all functions that the records of AOTAutograd are made with."""
    names = (aot_autograd, "create_aot_state"), (AOTAutogradCache, "save"), (graph_compile, "serialize_graph_module")
    return all(hasattr(owner, name) for owner, name in names) and hasattr(functorch_settings, "bundled_autograd_cache")


@contextmanager
def results_can_be_kept() -> Iterator[None]:
    """Let AOTAutograd make a record of what it compiles, and write no file."""
    create = aot_autograd.create_aot_state

    def create_with_record(*args: Any, **kwargs: Any) -> Any:
        state = create(*args, **kwargs)
        state.aot_config = replace(state.aot_config, cache_info=AOTAutogradCacheInfo("", 0, forward_symints=[]))
        return state

    with ExitStack() as stack:
        stack.enter_context(functorch_settings.patch(bundled_autograd_cache=True))
        stack.enter_context(patch.object(aot_autograd, "create_aot_state", create_with_record))
        stack.enter_context(patch.object(AOTAutogradCache, "save", lambda *_, **__: None))
        stack.enter_context(patch.object(graph_compile, "serialize_graph_module", lambda _: None))
        yield


class AotResult:
    """A compiled graph that is stored as AOTAutograd's record of it."""

    def __init__(self, run: Callable[..., Any], record: Record | None, lifted: Sequence[torch.Tensor]) -> None:
        """`lifted` are tensors of the graph itself, which AOTAutograd takes in front of the inputs."""
        self._run, self._record, self._lifted = run, record, lifted

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        return self._run(*inputs)

    def __reduce__(self) -> tuple[Callable[..., AotResult], tuple[Record, list[torch.Tensor]]]:
        if self._record is None:
            raise TypeError("AOTAutograd left no record of what it made of a graph")
        return _loaded, (self._record, list(self._lifted))


def aot_result(run: Callable[..., Any], module: torch.fx.GraphModule) -> AotResult:
    """Return AOTAutograd's result for a module, made within `results_can_be_kept`, in a form that can be stored."""
    serialize = getattr(run, "serialize", None)
    held = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    lifted = list(dict(held).values())
    return AotResult(run, serialize() if serialize is not None else None, lifted)


def _loaded(record: Record, lifted: list[torch.Tensor]) -> AotResult:
    compiled = record.wrap_post_compile([], record.sanitized_aot_config, {})

    def run(*inputs: Any) -> Any:
        return compiled([*lifted, *inputs])

    return AotResult(torch._dynamo.disable(run), record, lifted)  # type: ignore[no-untyped-call]
