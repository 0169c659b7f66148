"""Dynamo's settings and counters, which are private to torch; checked with torch 2.11 to 2.13."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any
from weakref import ref

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import eval_frame, utils
from torch._dynamo.exc import (
    BackendCompilerFailed,
    TorchDynamoException,
    exceptions_allowed_to_be_fallback,
)
from torch._functorch import config as functorch_settings
from torch.fx.experimental import _config as shape_settings

from ort_accel.capture import autograd_replacements, in_graph_asserts  # noqa: F401  they change Dynamo
from ort_accel.capture.engine_only import by_engine
from ort_accel.errors import OrtAccelError
from ort_accel.reporting import Reason, Report

COMPILATIONS = 64
"""How many compilations of one piece of code Dynamo may make. Its own limit of 8 is met by ordinary training: with and
without gradients, training and evaluation, each for fixed and for open sizes."""

LONG = 400
"""So many characters of an explanation are enough: some hold whole tensors and lists."""

OF_ALL_MODELS = 1 << 16
"""The same for all models of a process together: a search over models makes many."""

SAID_ONCE = ("warning_once", "info_once", "warning_advice")
"""What transformers adds to `logging.Logger`. A text that is logged once does not divide a graph for good."""


FOR_DYNAMO = (TorchDynamoException, *exceptions_allowed_to_be_fallback)
"""What a backend lets pass: by it Dynamo is told to begin anew, or to divide the graph."""


class _NotLogged(set[Any]):
    """Functions in a setting of Dynamo, of whose settings torch 2.11 logs a copy; it would sort them, which fails."""

    def __deepcopy__(self, memo: dict[int, Any]) -> set[Any]:
        return set()


@contextmanager
def capturing() -> Iterator[None]:
    """Dynamo as the engine wants it, for the call of a model. Errors of the engine come out as they are."""
    once = {getattr(logging.Logger, name) for name in SAID_ONCE if hasattr(logging.Logger, name)}
    with (
        torch._dynamo.config.patch(
            recompile_limit=COMPILATIONS,
            accumulated_recompile_limit=OF_ALL_MODELS,
            skip_nnmodule_hook_guards=False,  # or hooks of modules that come or go after a capture are overlooked
            optimize_ddp=False,  # or a model is cut into a graph for each of the buckets that gradients are sent in
            skip_tensor_guards_with_matching_dict_tags=False,  # or torch 2.11 overlooks a parameter that thaws
            ignore_logging_functions=_NotLogged(torch._dynamo.config.ignore_logging_functions | once),
            use_numpy_random_stream=True,  # or what a model has numpy draw comes from PyTorch's generator
            error_on_nested_fx_trace=False,  # or a call fails while another thread compiles; it runs in PyTorch instead
        ),
        # Equal sizes are not taken for the same size, or batch 8 x length 8 would compile code for squares.
        shape_settings.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        # A backward that cannot be compiled is known in time to leave its forward to PyTorch, too.
        functorch_settings.patch(force_non_lazy_backward_lowering=True),
        by_engine(),
    ):
        try:
            yield
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, OrtAccelError):
                raise error.inner_exception from None
            raise
        except KeyboardInterrupt as stop:
            if not _was_compiling(stop):
                raise
            raise KeyboardInterrupt from None  # some hundred lines of a compiler's frames say nothing


def forget(code: CodeType, backend: ref[Any]) -> None:
    """Let go of all that was compiled for code that nothing calls any more, and of its backend.

    By itself Dynamo keeps both for good: what was compiled for some code keeps that code. Behind a graph break it
    compiles code that models share, with which this stays.
    """
    reset_code(code)
    for key, kept in list(eval_frame.cached_backends.items()):
        if getattr(kept, "compiler_fn", kept) is backend():
            eval_frame.cached_backends.pop(key, None)  # collecting garbage may have come here in between


class GraphBreaks:
    """Tells where Dynamo left code to Python: what runs between graphs, and what is not captured at all."""

    def __init__(self) -> None:
        self._known: Counter[str] = Counter()

    def new(self) -> Counter[str]:
        """Those since it was last asked, each with its reason."""
        kinds = utils.counters["graph_break"], utils.counters["unimplemented"]
        if sum(kind.total() for kind in kinds) == self._known.total():
            return Counter()
        now = kinds[0] + kinds[1]
        found, self._known = now - self._known, now
        return Counter(dict.fromkeys(map(_short, found), 1))


@contextmanager
def graph_breaks_in(report: Report, breaks: GraphBreaks, check: Callable[[str], None]) -> Iterator[None]:
    """Record the graph breaks of a call, and let the policy for fallbacks judge them."""
    breaks.new()
    yield
    if found := breaks.new():
        for reason in found:
            report.fallback("a graph break", Reason.GRAPH_BREAK, reason)
        check("capture")


def _was_compiling(error: BaseException) -> bool:
    """True if an error comes out of Dynamo's compiling, not out of a call of what it compiled."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "torch._dynamo.convert_frame" for frame in frames)


def said_by(error: Exception) -> str:
    """The type of an error, and what it says in short."""
    return f"{type(error).__name__}: {_short(str(error))}"


def _short(message: str) -> str:
    """Dynamo's message without its hints: what it met, and the explanation."""
    lines = [line.strip() for line in message.splitlines()] or [""]
    said = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    code = [line.partition("code: ")[2] for line in lines if "code: " in line]
    rest = [text if len(text) <= LONG else f"{text[:LONG]} ..." for text in (*said[:1], *code[-1:])]
    return ": ".join([lines[0], *rest])
