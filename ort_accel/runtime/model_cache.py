"""Optimized models kept on disk between runs, so that the next start need not optimize again.

A file is named by a fingerprint of all that decides its content, and begins with a checksum of the rest. It is written
aside and renamed, so that a process that is killed, or several that share the folder, never leave a half-written one.
"""

from __future__ import annotations

import hashlib
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import ort_accel
from ort_accel.files import write_aside
from ort_accel.observe.logs import LOG
from ort_accel.reporting import Report

FORMAT = b"ort_accel cache 1\n"
CHECKSUM_BYTES = 32

UNFINISHED_SECONDS = 600.0
"""A file that nobody has written to for so long will not be finished."""


class ModelKeys:
    """Names models by a fingerprint of all that decides what ONNX Runtime makes of them."""

    def __init__(self, context: str) -> None:
        """`context` names what besides the model decides that: the runtime, its version and its settings."""
        self._context = "\n".join([ort_accel.__version__, platform.machine(), processor(), context]).encode()

    def of(self, model: bytes) -> str:
        """The fingerprint of a model."""
        return hashlib.sha256(self._context + b"\0" + model).hexdigest()


class ModelCache:
    """A folder of optimized models. Trouble with the folder is noted in the report and costs only the time saved."""

    def __init__(self, folder: Path, keys: ModelKeys, report: Report) -> None:
        self._folder, self._keys, self._report = folder, keys, report
        self._is_refused = False
        self._delete_unfinished()

    def get(self, model: bytes) -> bytes | None:
        """The optimized model, if it is there and whole."""
        path = self._path(model)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            self._report.counters["cache misses"] += 1
            return None
        except OSError as error:
            self._report.note(f"engine.cache_dir: cannot read {path}: {error.strerror}; the model is optimized again")
            return None
        body = content[len(FORMAT) + CHECKSUM_BYTES :]
        if content != FORMAT + hashlib.sha256(body).digest() + body:
            self._report.note(f"engine.cache_dir: {path} is damaged; it is made again")
            return None
        self._report.counters["cache hits"] += 1
        return body

    def put(self, model: bytes, optimized: bytes) -> None:
        """Keep an optimized model."""
        content = FORMAT + hashlib.sha256(optimized).digest() + optimized
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_aside(self._path(model), content)
        except OSError as error:
            text = f"{self._folder} cannot be written to: {error.strerror}; what is compiled is not kept"
            self._report.refused("engine.cache_dir", text)
            self._report.note(f"engine.cache_dir: {text}")
            if not self._is_refused:
                self._is_refused = True
                LOG.warning("engine.cache_dir: %s", text)

    def _delete_unfinished(self) -> None:
        """Delete what killed processes left; what is fresh may belong to one that is writing."""
        latest, count = time.time() - UNFINISHED_SECONDS, 0
        with suppress(OSError):
            for path in [*self._folder.glob(".*.model.*"), *self._folder.glob(".*.graph.*")]:
                if path.stat().st_mtime < latest:
                    path.unlink()
                    count += 1
        if count:
            self._report.note(f"engine.cache_dir: deleted half-written files of earlier runs: {count}")

    def _path(self, model: bytes) -> Path:
        return self._folder / f"{self._keys.of(model)}.model"


def optimized_by(create: Callable[[Path], object]) -> bytes:
    """The model that creating a session writes to the path it is given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        create(path)
        return path.read_bytes()


def processor() -> str:
    """The processor's name: optimized models may hold layouts for its vector width."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "cpu family", "model\t", "flags")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
