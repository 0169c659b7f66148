"""Making sessions: from the cache where it has the model, and writing models down where that is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

from ort_accel.errors import OrtAccelError
from ort_accel.files import write_aside
from ort_accel.runtime.cache import ModelCache, optimized_by
from ort_accel.runtime.session import Session, SessionSettings


class ModelFolder:
    """`engine.save_onnx`: a folder that models are written to under readable names."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".{prefix}.probe"
            write_aside(probe, b"")
            probe.unlink()
        except OSError as error:
            raise OrtAccelError(
                f"engine.save_onnx: cannot write to {folder}: {error.strerror}; name a folder that can be written"
            ) from error

    def write(self, name: str, kind: str, model: bytes) -> None:
        """Write one model, such as `ort_accel_forward_0_part_1.optimized.onnx`."""
        readable = re.sub(r"[^\w.-]+", "_", f"{self._prefix}_{name}")
        path = self._folder / f"{readable}.{kind}.onnx"
        try:
            write_aside(path, model)
        except OSError as error:
            raise OrtAccelError(f"engine.save_onnx: cannot write {path}: {error.strerror}") from error


class Sessions:
    """Makes the sessions of one model. Segments that are alike, such as those of equal layers, share one."""

    def __init__(
        self, settings: SessionSettings, cache: ModelCache | None = None, folder: ModelFolder | None = None
    ) -> None:
        self.settings = settings
        self._cache, self._folder = cache, folder
        self._made: WeakValueDictionary[bytes, Session] = WeakValueDictionary()

    def create(self, model: bytes, inputs: Sequence[str], outputs: Sequence[str], name: str) -> Session:
        """A session for a model that was written in ONNX; `name` is what `engine.save_onnx` calls it."""
        session = self._made.get(model)
        if session is None or self._folder is not None:
            session = self._made[model] = self._create(model, inputs, outputs, name)
        return session

    def _create(self, model: bytes, inputs: Sequence[str], outputs: Sequence[str], name: str) -> Session:
        if self._cache is None and self._folder is None:
            return Session(model, inputs, outputs, self.settings)
        optimized = self._optimized(model)
        if self._folder is not None:
            self._folder.write(name, "lowered", model)
            self._folder.write(name, "optimized", optimized)
        return Session(optimized, inputs, outputs, replace(self.settings, optimize=False))

    def _optimized(self, model: bytes) -> bytes:
        kept = self._cache.get(model) if self._cache else None
        if kept is not None:
            return kept
        optimized = optimized_by(lambda path: Session(model, [], [], self.settings, optimized_path=path))
        if self._cache is not None:
            self._cache.put(model, optimized)
        return optimized
