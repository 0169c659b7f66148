"""The models that ONNX Runtime runs at this moment, on a page of memory that is a file and outlives a crash.

A run writes its model's key into its thread's slot of the page and clears it afterwards: two stores in memory. The
operating system keeps what was stored, however the process ends.
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

from ort_accel.runtime.lock_files import delete_files, is_orphaned, locked_file, machine

PAGE_BYTES, SLOT_BYTES = 4096, 80
OVERFLOW_SLOT = PAGE_BYTES // SLOT_BYTES * SLOT_BYTES - SLOT_BYTES
"""The last slot, which threads share when all other slots are taken; it is never read."""

SAFE_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs"}
"""File systems on which a store into a mapped file cannot fail. A full disk or a lost server would end the process."""

TERMINATION_SIGNALS = [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__]
"""Signals by which others end a process; such an end is no evidence against a model."""


class CrashPage:
    """The page of this process in one folder. Where it cannot be a file, it is plain memory."""

    def __init__(self, folder: Path) -> None:
        self.memory: mmap | bytearray = bytearray(PAGE_BYTES)
        self._path = folder / f"running.{machine()}.{secrets.token_hex(8)}"
        self._lock: int | None = None
        self._delete_at_exit: set[Path] = set()
        self._thread = threading.local()
        self._free_slots = list(range(0, OVERFLOW_SLOT, SLOT_BYTES))
        with suppress(OSError):
            self._lock = locked_file(self._path, bytes(PAGE_BYTES)) if is_safe_to_map(folder) else None
            if self._lock is not None:
                self.memory = mmap(self._lock, PAGE_BYTES)
                _log_termination_signals(self._lock)
                Finalize(None, self._close, exitpriority=0)

    def slot(self) -> int:
        """Returns the offset at which the calling thread writes."""
        try:
            start: int = self._thread.start
        except AttributeError:
            self._thread.slot = slot = _Slot(self._free_slots)
            start = self._thread.start = slot.start
        return start

    def delete_at_exit(self, paths: Iterable[Path]) -> None:
        """Delete these files when the process ends without a crash."""
        self._delete_at_exit.update(paths)

    def _close(self) -> None:
        delete_files([*self._delete_at_exit, self._path])

    def detach(self) -> None:
        """Close the file and go on in plain memory."""
        memory, self.memory = self.memory, bytearray(PAGE_BYTES)
        if self._lock is not None and isinstance(memory, mmap):
            for number in TERMINATION_SIGNALS:
                faulthandler.unregister(number)
            memory.close()
            os.close(self._lock)
            self._lock = None


def _log_termination_signals(file: int) -> None:
    """Append a trace to the page's file when a signal ends the process: `models_at_crash` then ignores the page."""
    for number in TERMINATION_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            faulthandler.register(number, file, all_threads=False, chain=True)


class _Slot:
    """A thread's slot, free again when the thread has ended."""

    def __init__(self, free: list[int]) -> None:
        self._free = free
        try:
            self.start = free.pop()
        except IndexError:
            self.start = OVERFLOW_SLOT

    def __del__(self) -> None:
        if self.start != OVERFLOW_SLOT:
            self._free.append(self.start)


class RunningModel:
    """Marks a model on a page as run by the calling thread while the context is entered."""

    def __init__(self, page: CrashPage, key: str, number: int) -> None:
        """`number` counts the crashes in this model, this run's included."""
        self._page, self._entry = page, f"{key}.{number}".encode().ljust(SLOT_BYTES, b"\0")

    def __enter__(self) -> None:
        start = self._page.slot()
        self._page.memory[start : start + SLOT_BYTES] = self._entry

    def __exit__(self, *_: object) -> None:
        self._page.memory[self._page.slot()] = 0


def orphaned_pages(folder: Path) -> list[Path]:
    """Returns the pages of processes that have ended."""
    return [path for path in folder.glob("running.*") if is_orphaned(path, path.name.split(".")[1])]


def models_at_crash(page: Path) -> Iterator[tuple[str, int]]:
    """Yields the key and number of each model that ran at the crash; none if a termination signal ended the process."""
    content = page.read_bytes()
    if len(content) == PAGE_BYTES:
        for start in range(0, OVERFLOW_SLOT, SLOT_BYTES):
            if found := re.match(rb"([0-9a-f]{64})\.(\d+)\0", content[start : start + SLOT_BYTES]):
                yield found[1].decode(), int(found[2])


def is_safe_to_map(folder: Path) -> bool:
    """True if a store into a mapped file of this folder cannot fail."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    resolved = folder.resolve()
    kinds = {}
    for line in mounts:
        mount, kind = line.split()[4], line.partition(" - ")[2].split()[0]
        kinds[Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount))] = kind
    return next((kinds[path] in SAFE_FILE_SYSTEMS for path in (resolved, *resolved.parents) if path in kinds), False)


_PAGES: dict[Path, CrashPage] = {}
_PAGES_LOCK = threading.Lock()


def page_in(folder: Path) -> CrashPage:
    """Returns the page of this process in a folder."""
    with _PAGES_LOCK:
        if folder not in _PAGES:
            _PAGES[folder] = CrashPage(folder)
        return _PAGES[folder]


def detach_pages() -> None:
    """Close the files of all pages. A forked process does so, since the files and locks are its parent's."""
    for page in _PAGES.values():
        page.detach()
    _PAGES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=detach_pages)
