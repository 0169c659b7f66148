"""Signed files in a folder that other users may write to: only files that the same user wrote are read.

A file begins with an HMAC-SHA256 of its name and content. The key lies in a file that only its user can read, so nobody
else can write, alter or rename an accepted file. The signature is checked before anything else of a file is used.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ort_accel.files import write_aside
from ort_accel.reporting.report import Report

FORMAT = b"ort_accel signed 1\n"
KEY_BYTES = 32
MAC_BYTES = 32

MAX_FILE_BYTES = 1 << 30
"""The size above which a file is not read."""


class UntrustedKeyError(Exception):
    """Raised if other users may read or write the key's file or its folder."""


def key_path() -> Path:
    """Returns the file of the user's key."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "ort_accel" / "cache.key"


def user_key(path: Path) -> bytes:
    """Returns the user's key, and creates it if there is none. Raises OSError or `UntrustedKeyError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(path.parent.stat(), path.parent, stat.S_IWGRP | stat.S_IWOTH)
    with suppress(FileExistsError):
        _create_key(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _check_owner(found, path, stat.S_IRWXG | stat.S_IRWXO)
        key = file.read(KEY_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    if len(key) != KEY_BYTES:
        raise UntrustedKeyError(f"{path} is no key of {KEY_BYTES} bytes; delete it, and it is made again")
    return key


def _create_key(path: Path) -> None:
    """Create the key atomically. Of several processes one succeeds; the others raise FileExistsError."""
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


def _check_owner(found: os.stat_result, path: Path, forbidden: int) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & forbidden:
        raise UntrustedKeyError(f"{path} belongs to, or is open to, other users; make it yours alone, or delete it")


class SignedFiles:
    """A folder of signed files. Errors are noted in the report, and count as a missing file."""

    def __init__(self, folder: Path, suffix: str, report: Report, key: Path | None = None) -> None:
        """File names end with `suffix`; `key` is the path of the user's key, if not the default one."""
        self._folder, self._suffix, self._report = folder, suffix, report
        self._key: bytes | None = None
        try:
            self._key = user_key(key or key_path())
        except (OSError, UntrustedKeyError) as error:
            self._note(f"no graphs are kept, since there is no key to sign them with: {error}")

    def get(self, name: str) -> bytes | None:
        """Returns the content of a file; None if it is missing, damaged, or not written by this user."""
        path = self._path(name)
        try:
            found = self._read(path) if self._key is not None else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(f"cannot read {path}: {error.strerror}")
            return None
        if self._key is None:
            return None
        body = found[len(FORMAT) + MAC_BYTES :]
        if not hmac.compare_digest(found[: len(FORMAT) + MAC_BYTES], FORMAT + self._mac(self._key, name, body)):
            self._note(f"{path} is damaged, or somebody else has written it; it is not used, and made again")
            return None
        return body

    def put(self, name: str, body: bytes) -> bool:
        """Write a file. Returns false if that failed."""
        if self._key is None:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_aside(self._path(name), FORMAT + self._mac(self._key, name, body) + body)
        except OSError as error:
            self._note(f"cannot write to {self._folder}: {error.strerror}; nothing is kept")
            return False
        return True

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.{self._suffix}"

    @staticmethod
    def _read(path: Path) -> bytes:
        """Returns the bytes of a regular file, and no bytes for anything else: reading a pipe could block for ever."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            return file.read() if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_FILE_BYTES else b""

    @staticmethod
    def _mac(key: bytes, name: str, body: bytes) -> bytes:
        return hmac.digest(key, FORMAT + name.encode() + b"\0" + body, "sha256")

    def _note(self, text: str) -> None:
        self._report.note(f"engine.cache_dir: {text}")
