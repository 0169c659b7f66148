"""A cache of optimized models on disk, so that the next start need not optimize them again.

A file is named by a fingerprint of everything that decides its content, and begins with a checksum of the rest. It is
written under another name and renamed, so no process ever sees a half-written file.
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
from ort_accel.reporting.report import Report

FORMAT = b"ort_accel cache 1\n"
CHECKSUM_BYTES = 32

UNFINISHED_SECONDS = 600.0
"""The age from which a half-written file counts as abandoned."""


class ModelKeys:
    """Fingerprints of models and of everything else that decides how ONNX Runtime optimizes them."""

    def __init__(self, context: str) -> None:
        """`context` names the runtime, its version and its settings."""
        self._context = "\n".join([ort_accel.__version__, platform.machine(), processor(), context]).encode()

    def of(self, model: bytes) -> str:
        """Returns the fingerprint of a model."""
        return hashlib.sha256(self._context + b"\0" + model).hexdigest()


class ModelCache:
    """A folder of optimized models. Errors of the folder are noted in the report, and the model is optimized again."""

    def __init__(self, folder: Path, keys: ModelKeys, report: Report) -> None:
        self._folder, self._keys, self._report = folder, keys, report
        self._is_refused = False
        self._delete_unfinished()

    def get(self, model: bytes) -> bytes | None:
        """Returns the optimized model; None if it is missing or damaged."""
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
        """Store an optimized model."""
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
        """Delete old half-written files; a recent one may belong to a process that is writing."""
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


def optimized_model(create: Callable[[Path], object]) -> bytes:
    """Returns the model that `create` writes to the path that it is given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        create(path)
        return path.read_bytes()


def processor() -> str:
    """Returns the processor's name and flags: optimized models may hold layouts for its vector width."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    prefixes = ("model name", "cpu family", "model\t", "flags")
    return "\n".join(sorted({line for line in lines if line.startswith(prefixes)}))
