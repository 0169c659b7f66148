"""Files that say what a process is at, and stay when it dies.

The process holds a lock on its file, which the operating system drops when the process ends, in whatever way. So a file
without a lock was left by a process that ended at what the file says.
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
except ImportError:  # Windows, where nothing is remembered
    fcntl = None  # type: ignore[assignment]

FOREIGN_SECONDS = 3600.0
"""A file of another machine counts from this age on: whether a lock is seen from afar depends on the file system."""


def locked_file(path: Path, content: bytes = b"") -> int | None:
    """Make a file and hold its lock until what is returned is closed; None where there are no locks.

    The lock is taken before the file has its name: nobody ever finds it without. What is written later comes behind.
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
        forget([aside])
        raise
    return lock


def is_left_over(path: Path, made_on: str) -> bool:
    """Whether the process that made a file on a machine has ended."""
    try:
        age = time.time() - path.stat().st_mtime
        return (made_on == machine() or age > FOREIGN_SECONDS) and not _is_locked(path)
    except OSError:  # its process has just taken it away
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


def forget(paths: Iterable[Path]) -> None:
    """Take files away, as far as that can be done."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


@cache
def machine() -> str:
    """This machine since it was started, for which locks hold whatever the container; or else its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return re.sub(r"\W+", "-", platform.node())
