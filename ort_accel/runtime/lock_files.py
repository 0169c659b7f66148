"""Locked files that tell what a process is doing, and that outlive it when it crashes.

The operating system drops the lock when the process ends, in whatever way. A file without a lock was left by a process
that ended while it did what the file says.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks, so crashes are not remembered there
    fcntl = None  # type: ignore[assignment]

FOREIGN_SECONDS = 3600.0
"""The age from which a file of another machine counts as orphaned: remote locks may be invisible."""


def locked_file(path: Path, content: bytes = b"") -> int | None:
    """Create a file and hold its lock. Returns the descriptor to close, or None where there are no locks.

    The lock is taken before the file gets its name, so no process ever finds it unlocked. Later writes are appended.
    """
    if fcntl is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{secrets.token_hex(8)}")
    lock = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, content)
        aside.rename(path)
    except OSError:
        os.close(lock)
        delete_files([aside])
        raise
    return lock


def is_orphaned(path: Path, made_on: str) -> bool:
    """True if the process that made this file, on the machine `made_on`, has ended."""
    try:
        age = time.time() - path.stat().st_mtime
        return (made_on == machine() or age > FOREIGN_SECONDS) and not _is_locked(path)
    except OSError:  # its process has just deleted it
        return False


def _is_locked(path: Path) -> bool:
    if fcntl is None:
        return True
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def delete_files(paths: Iterable[Path]) -> None:
    """Delete files, and ignore those that cannot be deleted."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


@cache
def machine() -> str:
    """Returns an identifier of this boot of the machine, valid in all its containers; elsewhere the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return re.sub(r"\W+", "-", platform.node())
