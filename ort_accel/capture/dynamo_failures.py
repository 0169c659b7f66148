"""Code that Dynamo fails on, by a fault of its own, runs in Python, and what it calls is captured by itself.

Dynamo does so where it knows that it cannot capture something; other faults come out of it as errors. Behind a graph
break a call cannot begin anew, as part of it has run. It uses what is private to torch; checked with 2.11 to 2.13.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath
from types import CodeType
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo.convert_frame import ConvertFrame
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters

Note = Callable[[str, Exception, str], None]
"""Told what is left to Python, the fault, and at which line it was."""

_WATCHING: ContextVar[LeftToPython | None] = ContextVar("what learns of code that Dynamo fails on", default=None)


class NotCapturedError(Exception):
    """Dynamo could not capture a call, and nothing of it has run."""

    def __init__(self, code: CodeType, fault: Exception) -> None:
        super().__init__(str(fault))
        self.code, self.fault = code, fault


class LeftToPython:
    """Remembers the code that runs in Python, of the calls made for one function."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._entries: set[CodeType] = set()
        self._codes: set[CodeType] = set()
        self._present: CodeType | None = None
        """What is being captured."""
        self._failed: dict[CodeType, Exception] = {}
        """Of the present call."""

    @property
    def is_in_parts(self) -> bool:
        """Whether what is being captured is not where a call begins, but something that Python calls in it."""
        return self._present not in self._entries

    def begins_at(self, code: CodeType) -> None:
        """Where this code cannot be captured, the call fails, and can be made in another way."""
        self._entries.add(code)

    def leave(self, code: CodeType) -> None:
        """Do not try to capture this code any more."""
        self._codes.add(code)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a call. If it ends in an error, the batch is at fault, not Dynamo, and what failed is tried again."""
        failed: dict[CodeType, Exception] = {}
        self._failed = failed
        before = _WATCHING.set(self)
        try:
            yield
        finally:
            _WATCHING.reset(before)
            self._failed = {}
        self._codes.update(failed)
        innermost = {line_of_fault(fault) or code: code for code, fault in failed.items()}  # others fail for its sake
        for code in innermost.values():
            self._note(f"code of {code.co_qualname}", failed[code], line_of_fault(failed[code]))

    def convert(self, code: CodeType, convert: Callable[[], ConvertFrameReturn]) -> ConvertFrameReturn:
        """What Dynamo makes of some code, or that it is to run as it stands, this time."""
        if code not in self._codes:
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


def is_in_parts() -> bool:
    """Whether Python, which calls what is being captured, goes on with its results before they are a model's."""
    watching = _WATCHING.get()
    return watching is not None and watching.is_in_parts


def line_of_fault(fault: Exception) -> str:
    """The line of the model at which Dynamo failed, or an empty text."""
    frame = getattr(fault, "innermost_user_frame_summary", None)
    return f"{PurePath(frame.filename).name}:{frame.lineno}: {frame.line}" if frame is not None else ""


def _is_fault_of_dynamo(error: Exception) -> bool:
    """Whether Dynamo failed, not a backend. It may have been the batch that it failed on."""
    if isinstance(error, AssertionError):
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        return str(innermost.f_globals.get("__name__", "")).startswith("torch._dynamo.")
    return isinstance(error, InternalTorchDynamoError | TorchRuntimeError)


def _uncount(fault: Exception) -> None:
    """Take a fault out of what Dynamo counts as graph breaks: the graph ends there, and nothing goes on behind it."""
    for message in [message for message in counters["unimplemented"] if str(fault).startswith(message)]:
        counters["unimplemented"].pop(message)


def _watch_conversions() -> None:
    usual = ConvertFrame.__call__

    def convert(self: Any, frame: Any, *args: Any, **kwargs: Any) -> ConvertFrameReturn:
        watching = _WATCHING.get()
        if watching is None:
            return usual(self, frame, *args, **kwargs)
        return watching.convert(frame.f_code, lambda: usual(self, frame, *args, **kwargs))

    ConvertFrame.__call__ = convert  # type: ignore[method-assign]


_watch_conversions()
