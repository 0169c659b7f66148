"""Writes files so that no reader ever finds half of one."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_aside(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with aside.open("xb") as file:
            file.write(content)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def why_not_writable(path: Path) -> str:
    """Returns the reason why a file cannot be written; empty where it can. Its folder is made if need be."""
    probe = path.with_name(f".{path.name}.probe")
    try:
        if path.is_dir():
            return "it is a folder"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(probe, b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""
