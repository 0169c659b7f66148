"""Sets Dynamo up for the engine, and reads its counters. Private to torch; checked with torch 2.11 to 2.14."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
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

from ort_accel.capture import autograd_replacements  # noqa: F401  patches Dynamo
from ort_accel.capture.dynamo_patches import by_engine
from ort_accel.errors import OrtAccelError
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import Report

RECOMPILE_LIMIT = 64
"""Compilations of one code object. Ordinary training exceeds Dynamo's limit of 8: with and without gradients, in
training and evaluation, each for static and for dynamic sizes."""

ACCUMULATED_RECOMPILE_LIMIT = 1 << 16
"""Compilations of a code object for all models of a process: a hyperparameter search builds many."""

BACKWARD_AUTOCAST = {"backward_pass_autocast": "off"} if hasattr(functorch_settings, "backward_pass_autocast") else {}
"""The backward runs outside of autocast, as PyTorch recommends. Tracing would cast what a model keeps in fp32."""

EXPLANATION_CHARACTERS = 400
"""The length to which explanations are cut: some hold whole tensors and lists."""

LOG_ONCE_METHODS = ("warning_once", "info_once", "warning_advice")
"""Methods that transformers adds to `logging.Logger`. Dynamo ignores them instead of breaking the graph."""


DYNAMO_ERRORS = (TorchDynamoException, *exceptions_allowed_to_be_fallback)
"""Errors that a backend does not catch: they tell Dynamo to restart, or to break the graph."""

LogFunction = Callable[..., object]


class _UncopiedSet(set[LogFunction]):
    """Functions that copies of Dynamo's settings lack: torch 2.11 logs a sorted copy, and cannot sort them."""

    def __deepcopy__(self, memo: dict[int, object]) -> set[LogFunction]:
        return set()


@contextmanager
def capturing() -> Iterator[None]:
    """Set Dynamo up for a model's call, and let errors of the engine through as they are."""
    once = {getattr(logging.Logger, name) for name in LOG_ONCE_METHODS if hasattr(logging.Logger, name)}
    with (
        torch._dynamo.config.patch(
            recompile_limit=RECOMPILE_LIMIT,
            accumulated_recompile_limit=ACCUMULATED_RECOMPILE_LIMIT,
            skip_nnmodule_hook_guards=False,  # else hooks that come or go after a capture are overlooked
            optimize_ddp=False,  # else there is a graph for each bucket of gradients
            skip_tensor_guards_with_matching_dict_tags=False,  # else torch 2.11 overlooks a parameter that thaws
            ignore_logging_functions=_UncopiedSet(torch._dynamo.config.ignore_logging_functions | once),
            use_numpy_random_stream=True,  # else numpy's draws come from PyTorch's generator
            error_on_nested_fx_trace=False,  # else a call fails while another thread compiles
        ),
        # Equal sizes get symbols of their own, else batch 8 x length 8 compiles code for squares.
        shape_settings.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        # The backward is compiled with its forward, so that PyTorch runs both if it fails.
        functorch_settings.patch(force_non_lazy_backward_lowering=True, **BACKWARD_AUTOCAST),
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
            raise KeyboardInterrupt from None  # without the compiler's frames


def free_compiled(code: CodeType, backend: ref[Callable[..., object]]) -> None:
    """Free what was compiled for code that nothing calls any more, and its backend: Dynamo itself keeps both."""
    reset_code(code)
    for key, kept in list(eval_frame.cached_backends.items()):
        if getattr(kept, "compiler_fn", kept) is backend():
            eval_frame.cached_backends.pop(key, None)  # a garbage collection may have removed it meanwhile


class GraphBreaks:
    """Counts graph breaks, and code that is not captured at all."""

    def __init__(self) -> None:
        self._known: Counter[str] = Counter()

    def new(self) -> Counter[str]:
        """Return the reasons of those since the last call."""
        kinds = utils.counters["graph_break"], utils.counters["unimplemented"]
        if sum(kind.total() for kind in kinds) == self._known.total():
            return Counter()
        now = kinds[0] + kinds[1]
        found, self._known = now - self._known, now
        return Counter(dict.fromkeys(map(_summary, found), 1))


@contextmanager
def record_graph_breaks(report: Report, breaks: GraphBreaks, check: Callable[[str], None]) -> Iterator[None]:
    """Record the graph breaks of a call, and let `check`, the policy for fallbacks, judge them."""
    breaks.new()
    yield
    if found := breaks.new():
        for reason in found:
            report.fallback("a graph break", Reason.GRAPH_BREAK, reason)
        check("capture")


def _was_compiling(error: BaseException) -> bool:
    """True if an error was raised while Dynamo compiled, not by a call of what it compiled."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "torch._dynamo.convert_frame" for frame in frames)


def error_summary(error: Exception) -> str:
    """Return the type of an error, with its message in short."""
    return f"{type(error).__name__}: {_summary(str(error))}"


def _summary(message: str) -> str:
    """Return Dynamo's message without its hints: what it met, the explanation, and the line of code."""
    lines = [line.strip() for line in message.splitlines()] or [""]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    code = [line.partition("code: ")[2] for line in lines if "code: " in line]
    rest = [_shortened(text) for text in (*explained[:1], *code[-1:])]
    return ": ".join([lines[0], *rest])


def _shortened(text: str) -> str:
    return text if len(text) <= EXPLANATION_CHARACTERS else f"{text[:EXPLANATION_CHARACTERS]} ..."
