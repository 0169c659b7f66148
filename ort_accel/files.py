"""Writing files so that nobody ever reads half of one."""

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
