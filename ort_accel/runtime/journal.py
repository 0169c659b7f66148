"""What ONNX Runtime was doing when a process ended, so that no run dies twice more of what two died of.

Before ONNX Runtime does something with a model for the first time, an empty file is put beside the cache, and taken
away when that is over. Its name says which model, which attempt at it, and whose; the process holds a lock on it, which
the operating system drops when the process ends, in whatever way. So a file without a lock was left by a process that
ended within ONNX Runtime. Processes of one launch make the same attempt, so that a launch that dies counts once.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ort_accel.errors import OrtAccelError
from ort_accel.observe.logs import LOG
from ort_accel.reporting import Report
from ort_accel.runtime.cache import ModelKeys

try:
    import fcntl
except ImportError:  # Windows, where nothing is remembered
    fcntl = None  # type: ignore[assignment]

FOLDER = "attempts"

MOST_DEATHS = 2
"""After so many runs that ended in a model, PyTorch runs it."""

FOREIGN_SECONDS = 3600.0
"""A file of another machine counts from this age on: whether a lock is seen from afar depends on the file system."""


class EndedBefore(OrtAccelError):
    """ONNX Runtime is not given a model that earlier runs ended in."""


class CrashJournal:
    """Remembers on disk what ONNX Runtime is doing for the first time. Trouble with the folder is only noted."""

    def __init__(self, folder: Path, keys: ModelKeys, report: Report) -> None:
        """`folder` is the cache's; any number of processes may share it."""
        self._folder, self._keys, self._report = folder / FOLDER, keys, report

    def attempt(self, model: bytes, name: str) -> Attempt:
        """ONNX Runtime is about to be given a model; `name` is what a reader of the log knows it by."""
        key = self._keys.of(model)
        left = self._left_by_the_dead(key)
        deaths = max((marker.number for marker in left), default=0)
        ended = f"{deaths} {'run' if deaths == 1 else 'runs'} ended while ONNX Runtime created or first ran it"
        if deaths >= MOST_DEATHS:
            self._tell(f"{name}: PyTorch runs it, since {ended}; delete {self._folder} to have it tried again")
            raise EndedBefore(ended)
        if deaths:
            self._tell(f"{name}: {ended}; it is tried once more")
        mark = f"{key}.{deaths + 1}.{_machine()}.{os.getpid()}"
        return Attempt(self, mark, tuple(marker.path for marker in left))

    @contextmanager
    def marked(self, name: str) -> Iterator[None]:
        """Keep a locked file of this name as long as this takes."""
        path = self._folder / name
        try:
            lock = self._mark(path)
        except OSError as error:
            self._report.note(
                f"engine.cache_dir: cannot write to {self._folder}: {error.strerror}; "
                "should ONNX Runtime end a process, the next run will not know"
            )
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                forget([path])
                os.close(lock)

    def _mark(self, path: Path) -> int | None:
        """The lock is taken before the file has its name: nobody ever finds it without."""
        if fcntl is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{secrets.token_hex(8)}")
        lock = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside.rename(path)
        except OSError:
            os.close(lock)
            forget([aside])
            raise
        return lock

    def _left_by_the_dead(self, key: str) -> list[_Marker]:
        try:
            markers = [marker for path in self._folder.glob(f"{key}.*") if (marker := _Marker.at(path)) is not None]
        except OSError:
            return []
        return [marker for marker in markers if marker.is_left_over()]

    def _tell(self, text: str) -> None:
        self._report.note(text)
        LOG.warning(text)


@dataclass(frozen=True)
class Attempt:
    """The first use of a model. Without a journal it leaves no trace."""

    journal: CrashJournal | None = None
    mark: str = ""
    earlier: tuple[Path, ...] = ()
    """What runs left that ended in this model."""

    def watched(self) -> AbstractContextManager[None]:
        """ONNX Runtime creates or runs the model in here."""
        return nullcontext() if self.journal is None else self.journal.marked(self.mark)

    def succeeded(self) -> None:
        """The model has run: what ended earlier runs was not in it."""
        forget(self.earlier)


@dataclass(frozen=True)
class _Marker:
    path: Path
    number: int
    machine: str

    @classmethod
    def at(cls, path: Path) -> _Marker | None:
        parts = path.name.split(".")
        return cls(path, int(parts[1]), parts[2]) if len(parts) == 4 and parts[1].isdecimal() else None

    def is_left_over(self) -> bool:
        """Whether the process that made it has ended."""
        try:
            age = time.time() - self.path.stat().st_mtime
            return (self.machine == _machine() or age > FOREIGN_SECONDS) and not self._is_locked()
        except OSError:  # its process has just taken it away
            return False

    def _is_locked(self) -> bool:
        if fcntl is None:
            return True
        file = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False


def forget(paths: Iterable[Path]) -> None:
    """Take files away, as far as that can be done."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


@cache
def _machine() -> str:
    """This machine since it was started, for which locks hold whatever the container; or else its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return re.sub(r"\W+", "-", platform.node())
