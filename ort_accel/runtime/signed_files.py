"""Files that only their own user's later processes accept, in a folder that others may write to.

A file begins with an HMAC-SHA256 of its name and content. The key is a file of the user's own, which nobody else can
read, so that nobody else can write an entry that is accepted, alter one, or give it another name. Nothing of a file is
looked at before that is checked.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ort_accel.files import write_aside
from ort_accel.reporting import Report

FORMAT = b"ort_accel signed 1\n"
KEY_BYTES = 32
MAC_BYTES = 32

MOST_BYTES = 1 << 30
"""A larger file is not read."""


class NotTrusted(Exception):
    """A file that holds the key, or its folder, is not the user's own."""


def key_path() -> Path:
    """The file that holds the user's key."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "ort_accel" / "cache.key"


def user_key(path: Path) -> bytes:
    """The user's key, which is made where there is none. Raises OSError or `NotTrusted`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(path.parent.stat(), path.parent, stat.S_IWGRP | stat.S_IWOTH)
    with suppress(FileExistsError):
        _make(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _check(found, path, stat.S_IRWXG | stat.S_IRWXO)
        key = file.read(KEY_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    if len(key) != KEY_BYTES:
        raise NotTrusted(f"{path} is no key of {KEY_BYTES} bytes; delete it, and it is made again")
    return key


def _make(path: Path) -> None:
    """Make a key, whole or not at all. Of several processes one succeeds; the others raise FileExistsError."""
    if path.exists():
        return
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(aside, path)
    finally:
        aside.unlink()


def _check(found: os.stat_result, path: Path, forbidden: int) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & forbidden:
        raise NotTrusted(f"{path} belongs to, or is open to, other users; make it yours alone, or delete it")


class SignedFiles:
    """A folder of such files. Trouble is noted in the report and costs only the time that a file would have saved."""

    def __init__(self, folder: Path, suffix: str, report: Report, key: Path | None = None) -> None:
        """Names end with `suffix`; `key` is where the user's key is, if not at its usual place."""
        self._folder, self._suffix, self._report = folder, suffix, report
        self._key: bytes | None = None
        try:
            self._key = user_key(key or key_path())
        except (OSError, NotTrusted) as error:
            self._say(f"no graphs are kept, since there is no key to sign them with: {error}")

    def get(self, name: str) -> bytes | None:
        """The content of a file that this user has written, if it is there and whole."""
        path = self._path(name)
        try:
            found = self._read(path) if self._key is not None else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say(f"cannot read {path}: {error.strerror}")
            return None
        if self._key is None:
            return None
        body = found[len(FORMAT) + MAC_BYTES :]
        if not hmac.compare_digest(found[: len(FORMAT) + MAC_BYTES], FORMAT + self._mac(self._key, name, body)):
            self._say(f"{path} is damaged, or somebody else has written it; it is not used, and made again")
            return None
        return body

    def put(self, name: str, body: bytes) -> bool:
        """Keep a file; says whether it is kept."""
        if self._key is None:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_aside(self._path(name), FORMAT + self._mac(self._key, name, body) + body)
        except OSError as error:
            self._say(f"cannot write to {self._folder}: {error.strerror}; nothing is kept")
            return False
        return True

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.{self._suffix}"

    @staticmethod
    def _read(path: Path) -> bytes:
        """The bytes of a plain file; none of anything else, such as a pipe, on which reading would wait for ever."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            return file.read() if stat.S_ISREG(found.st_mode) and found.st_size <= MOST_BYTES else b""

    @staticmethod
    def _mac(key: bytes, name: str, body: bytes) -> bytes:
        return hmac.digest(key, FORMAT + name.encode() + b"\0" + body, "sha256")

    def _say(self, what: str) -> None:
        self._report.note(f"engine.cache_dir: {what}")
