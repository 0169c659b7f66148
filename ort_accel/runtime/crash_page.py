"""Which models ONNX Runtime runs at this moment, on a page of memory that is a file and outlives the process.

A run writes its model's name there and takes it back, which are two stores in memory. The operating system keeps what
was stored, however the process ends. Each thread has a place of its own on the page.
"""

from __future__ import annotations

import faulthandler
import os
import re
import secrets
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from mmap import mmap
from multiprocessing.util import Finalize
from pathlib import Path

from ort_accel.runtime.lock_files import forget, is_left_over, locked_file, machine

SIZE, WIDTH = 4096, 80
SPARE = SIZE // WIDTH * WIDTH - WIDTH
"""The last place is for all threads beyond those that have one of their own; nobody reads it."""

SAFE_STORES = {"ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs"}
"""File systems on which a store into memory that is a file cannot fail. Elsewhere, on a server that is gone or a disk
that is full, it may end the process."""

ENDING = [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__]
"""Signals by which others end a process, wherever it is; that is no sign against a model."""


class RunningPage:
    """The page of this process in one folder. Where it cannot be a file, it is plain memory."""

    def __init__(self, folder: Path) -> None:
        self.memory: mmap | bytearray = bytearray(SIZE)
        self._path = folder / f"running.{machine()}.{secrets.token_hex(8)}"
        self._lock: int | None = None
        self._settled: set[Path] = set()
        self._own = threading.local()
        self._free = list(range(0, SPARE, WIDTH))
        with suppress(OSError):
            self._lock = locked_file(self._path, bytes(SIZE)) if is_safe_to_store(folder) else None
            if self._lock is not None:
                self.memory = mmap(self._lock, SIZE)
                _tell_of_signals(self._lock)
                Finalize(None, self._close, exitpriority=0)

    def place(self) -> int:
        """Where the calling thread writes."""
        try:
            start: int = self._own.start
        except AttributeError:
            self._own.place = place = _Place(self._free)
            start = self._own.start = place.start
        return start

    def settle(self, paths: Iterable[Path]) -> None:
        """These files are to go when the process ends by itself."""
        self._settled.update(paths)

    def _close(self) -> None:
        """The process ends by itself: what earlier ones ended in was gone well through."""
        forget([*self._settled, self._path])

    def leave(self) -> None:
        """Let go of the file."""
        memory, self.memory = self.memory, bytearray(SIZE)
        if self._lock is not None and isinstance(memory, mmap):
            for number in ENDING:
                faulthandler.unregister(number)
            memory.close()
            os.close(self._lock)
            self._lock = None


def _tell_of_signals(file: int) -> None:
    """Have it written behind the page when a signal ends the process, before it does."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            faulthandler.register(number, file, all_threads=False, chain=True)


class _Place:
    """A thread's place, free again when the thread has ended."""

    def __init__(self, free: list[int]) -> None:
        self._free = free
        try:
            self.start = free.pop()
        except IndexError:
            self.start = SPARE

    def __del__(self) -> None:
        if self.start != SPARE:
            self._free.append(self.start)


class Running:
    """A model on a page: inside, the calling thread runs it."""

    def __init__(self, page: RunningPage, key: str, number: int) -> None:
        """`number` says which death in this model it would be."""
        self._page, self._entry = page, f"{key}.{number}".encode().ljust(WIDTH, b"\0")

    def __enter__(self) -> None:
        place = self._page.place()
        self._page.memory[place : place + WIDTH] = self._entry

    def __exit__(self, *_: object) -> None:
        self._page.memory[self._page.place()] = 0


def left_pages(folder: Path) -> list[Path]:
    """The pages of processes that have ended."""
    return [path for path in folder.glob("running.*") if is_left_over(path, path.name.split(".")[1])]


def running_at_the_end(page: Path) -> Iterator[tuple[str, int]]:
    """The models, and which death in each it was; none where a signal ended the process, which is written behind."""
    content = page.read_bytes()
    if len(content) == SIZE:
        for start in range(0, SPARE, WIDTH):
            if found := re.match(rb"([0-9a-f]{64})\.(\d+)\0", content[start : start + WIDTH]):
                yield found[1].decode(), int(found[2])


def is_safe_to_store(folder: Path) -> bool:
    """Whether the folder's file system is one on which a store cannot fail."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    at = folder.resolve()
    kinds = {}
    for line in mounts:
        place, kind = line.split()[4], line.partition(" - ")[2].split()[0]
        kinds[Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), place))] = kind
    return next((kinds[path] in SAFE_STORES for path in (at, *at.parents) if path in kinds), False)


_PAGES: dict[Path, RunningPage] = {}
_OPENING = threading.Lock()


def page_in(folder: Path) -> RunningPage:
    """The page of this process in a folder."""
    with _OPENING:
        if folder not in _PAGES:
            _PAGES[folder] = RunningPage(folder)
        return _PAGES[folder]


def leave_pages() -> None:
    """Let go of all files. A process that was forked does: they are its parent's, and their locks end with it."""
    for page in _PAGES.values():
        page.leave()
    _PAGES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=leave_pages)
