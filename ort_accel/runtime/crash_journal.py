"""What ONNX Runtime was doing when a process ended, so that no run dies twice more of what two died of.

Before ONNX Runtime does something with a model for the first time, an empty file is put beside the cache, and taken
away when that is over. Its name says which model, which attempt at it, and whose. Later runs of the model are written
on the page of the process (`running.py`); what such a page tells of a process that died becomes a file of the same
kind. Processes of one launch make the same attempt, so that a launch that dies counts once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from ort_accel.errors import OrtAccelError
from ort_accel.observe.logs import LOG
from ort_accel.reporting import Report
from ort_accel.runtime.crash_page import Running, is_safe_to_store, left_pages, page_in, running_at_the_end
from ort_accel.runtime.lock_files import forget, is_left_over, locked_file, machine
from ort_accel.runtime.model_cache import ModelKeys

FOLDER = "attempts"

LATER = "later-"
"""Begins the last part of the name of what tells of a later run than the first."""

MOST_DEATHS = 2
"""After so many runs that ended in a model, PyTorch runs it."""


class EndedBefore(OrtAccelError):
    """ONNX Runtime is not given a model that earlier runs ended in."""


class CrashJournal:
    """Remembers on disk what ONNX Runtime is doing. Trouble with the folder is only noted."""

    def __init__(self, folder: Path, keys: ModelKeys, report: Report) -> None:
        """`folder` is the cache's; any number of processes may share it."""
        self.folder = (folder / FOLDER).absolute()
        self._keys, self._report = keys, report
        self._untold: list[_Marker] = []
        """What pages tell and cannot be written as files."""
        with suppress(OSError):
            self._take_in_pages()
        if not is_safe_to_store(self.folder):
            self._report.note(
                f"engine.cache_dir: on the file system of {folder} only crashes in a model's first run are remembered"
            )

    def attempt(self, model: bytes, name: str) -> Attempt:
        """ONNX Runtime is about to be given a model; `name` is what a reader of the log knows it by."""
        key = self._keys.of(model)
        left = self._left_by_the_dead(key)
        deaths = max((marker.number for marker in left), default=0)
        ended = f"{deaths} {'run' if deaths == 1 else 'runs'} ended while ONNX Runtime created or ran it"
        if deaths >= MOST_DEATHS:
            self._tell(f"{name}: PyTorch runs it, since {ended}; delete {self.folder} to have it tried again")
            raise EndedBefore(ended)
        if deaths:
            self._tell(f"{name}: {ended}; it is tried once more")
        return Attempt(self, key, deaths + 1, tuple(left))

    @contextmanager
    def marked(self, name: str) -> Iterator[None]:
        """Keep a locked file of this name as long as this takes."""
        path = self.folder / name
        try:
            lock = locked_file(path)
        except OSError as error:
            self._report.note(
                f"engine.cache_dir: cannot write to {self.folder}: {error.strerror}; "
                "should ONNX Runtime end a process, the next run will not know"
            )
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                forget([path])
                os.close(lock)

    def _take_in_pages(self) -> None:
        """Make files of what the pages of dead processes tell."""
        for page in left_pages(self.folder):
            with suppress(FileNotFoundError):  # another process has just done so
                for key, number in running_at_the_end(page):
                    self._write_down(key, number, page.name.rpartition(".")[2])
                forget([page])

    def _write_down(self, key: str, number: int, process: str) -> None:
        path = self.folder / f"{key}.{number}.{machine()}.{LATER}{process}"
        try:
            path.touch()
        except OSError:
            self._untold.append(_Marker(path, number, machine()))

    def _left_by_the_dead(self, key: str) -> list[_Marker]:
        try:
            markers = [marker for path in self.folder.glob(f"{key}.*") if (marker := _Marker.at(path)) is not None]
        except OSError:
            markers = []
        untold = [marker for marker in self._untold if marker.path.name.startswith(key)]
        return untold + [marker for marker in markers if is_left_over(marker.path, marker.machine)]

    def _tell(self, text: str) -> None:
        self._report.note(text)
        LOG.warning(text)


@dataclass(frozen=True)
class _Marker:
    """A file that a process left that died in a model, or the like for a later run."""

    path: Path
    number: int
    machine: str

    @classmethod
    def at(cls, path: Path) -> _Marker | None:
        parts = path.name.split(".")
        return cls(path, int(parts[1]), parts[2]) if len(parts) == 4 and parts[1].isdecimal() else None

    @property
    def is_of_later_run(self) -> bool:
        return self.path.name.rpartition(".")[2].startswith(LATER)


@dataclass(frozen=True)
class Attempt:
    """The use of a model in this process. Without a journal it leaves no trace."""

    journal: CrashJournal | None = None
    key: str = ""
    number: int = 1
    earlier: tuple[_Marker, ...] = ()
    """What runs left that ended in this model."""

    def watched(self) -> AbstractContextManager[None]:
        """ONNX Runtime creates or first runs the model in here."""
        if self.journal is None:
            return nullcontext()
        return self.journal.marked(f"{self.key}.{self.number}.{machine()}.{os.getpid()}")

    def succeeded(self) -> None:
        """The model has run: what ended earlier runs at their beginning was not in it."""
        forget(marker.path for marker in self.earlier if not marker.is_of_later_run)

    def later_runs(self) -> AbstractContextManager[None]:
        """ONNX Runtime runs the model in here, time and again.

        What ended earlier runs in this way is forgotten when the process ends by itself.
        """
        if self.journal is None:
            return nullcontext()
        later = [marker for marker in self.earlier if marker.is_of_later_run]
        page = page_in(self.journal.folder)
        page.settle(marker.path for marker in later)
        return Running(page, self.key, 1 + max((marker.number for marker in later), default=0))
