"""Runs code in Python that Dynamo fails on by a fault of its own, and captures the functions that this code calls.

Dynamo does so itself where it knows that it cannot capture something; its other faults come out as errors. Behind a
graph break a call cannot be repeated, as part of it has run. Private to torch; checked with torch 2.11 to 2.14.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo.convert_frame import ConvertFrame
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters

from ort_accel.capture.traced_shapes import freed_traces

if TYPE_CHECKING:
    from torch._C._dynamo.eval_frame import _PyInterpreterFrame

OnFailure = Callable[[str, Exception, str], None]
"""Called with the code that is left to Python, the fault, and the line at which Dynamo failed."""

_ACTIVE: ContextVar[SkippedCode | None] = ContextVar("handles failures of Dynamo", default=None)


class NotCapturedError(Exception):
    """Dynamo could not capture a call, and nothing of it has run."""

    def __init__(self, code: CodeType, fault: Exception) -> None:
        super().__init__(str(fault))
        self.code, self.fault = code, fault


class SkippedCode:
    """Remembers which code runs in Python, for the calls of one function."""

    def __init__(self, on_failure: OnFailure) -> None:
        self._on_failure = on_failure
        self._entries: set[CodeType] = set()
        self._skipped: set[CodeType] = set()
        self._present: CodeType | None = None
        """The code that is being captured."""
        self._failed: dict[CodeType, Exception] = {}
        """Failures of the present call."""

    @property
    def is_in_parts(self) -> bool:
        """True if the code that is being captured is not the entry of a call, but called by Python within it."""
        return self._present not in self._entries

    def begins_at(self, code: CodeType) -> None:
        """Take this code for an entry: if it cannot be captured, the call fails, and the caller makes it anew."""
        self._entries.add(code)

    def leave(self, code: CodeType) -> None:
        """Do not try to capture this code any more."""
        self._skipped.add(code)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle Dynamo's failures in a call. If the call raises, the batch is at fault, and capture is tried again."""
        failed: dict[CodeType, Exception] = {}
        self._failed = failed
        before = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(before)
            self._failed = {}
        self._skipped.update(failed)
        innermost = {failure_line(fault) or code: code for code, fault in failed.items()}  # callers fail with it
        for code in innermost.values():
            self._on_failure(f"code of {code.co_qualname}", failed[code], failure_line(failed[code]))

    def convert(self, code: CodeType, convert: Callable[[], ConvertFrameReturn]) -> ConvertFrameReturn:
        """Return Dynamo's conversion of some code, or the order to run it in Python this time."""
        if code not in self._skipped:
            before, self._present = self._present, code
            try:
                return convert()
            except Exception as error:
                if not _is_fault_of_dynamo(error):
                    raise
                _uncount(error)
                if code in self._entries:
                    raise NotCapturedError(code, error) from None
                self._failed[code] = error
            finally:
                self._present = before
        return ConvertFrameReturn(_FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT), apply_to_code=False)


def is_behind_graph_break() -> bool:
    """True if Python calls what is being captured, and goes on with its results before they are a model's."""
    active = _ACTIVE.get()
    return active is not None and active.is_in_parts


def failure_line(fault: Exception) -> str:
    """Return the line of the model at which Dynamo failed, or an empty text."""
    frame = getattr(fault, "innermost_user_frame_summary", None)
    return f"{PurePath(frame.filename).name}:{frame.lineno}: {frame.line}" if frame is not None else ""


def _is_fault_of_dynamo(error: Exception) -> bool:
    """True if Dynamo failed, not a backend. The cause may still be the batch."""
    if isinstance(error, AssertionError):
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        return str(innermost.f_globals.get("__name__", "")).startswith("torch._dynamo.")
    return isinstance(error, InternalTorchDynamoError | TorchRuntimeError)


def _uncount(fault: Exception) -> None:
    """Remove a fault from Dynamo's count of graph breaks: no graph goes on behind it."""
    for message in [message for message in counters["unimplemented"] if str(fault).startswith(message)]:
        counters["unimplemented"].pop(message)


def _patch_conversions() -> None:
    original = ConvertFrame.__call__

    def convert(self: ConvertFrame, frame: _PyInterpreterFrame, *args: Any, **kwargs: Any) -> ConvertFrameReturn:
        active = _ACTIVE.get()
        if active is None:
            return original(self, frame, *args, **kwargs)
        with freed_traces():
            return active.convert(frame.f_code, lambda: original(self, frame, *args, **kwargs))

    ConvertFrame.__call__ = convert  # type: ignore[method-assign]


_patch_conversions()
