"""Making sessions: from the cache where it has the model, and writing models down where that is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from ort_accel.errors import OrtAccelError
from ort_accel.files import write_aside
from ort_accel.runtime.crash_journal import Attempt, CrashJournal
from ort_accel.runtime.dlpack import OrtValue
from ort_accel.runtime.model_cache import ModelCache, optimized_by
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


class Run(Protocol):
    """Runs a model."""

    def __call__(self, feeds: Sequence[OrtValue], into: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Run on these inputs; results are written into these tensors, where there are some."""


class Sessions:
    """Makes the sessions of one model. Segments that are alike, such as those of equal layers, share one."""

    def __init__(
        self,
        settings: SessionSettings,
        cache: ModelCache | None = None,
        folder: ModelFolder | None = None,
        journal: CrashJournal | None = None,
    ) -> None:
        self.settings = settings
        self._cache, self._folder, self._journal = cache, folder, journal
        self._made: WeakValueDictionary[bytes, _Watched] = WeakValueDictionary()

    def __reduce__(self) -> Any:
        if self._cache or self._folder or self._journal:
            raise TypeError("sessions with a cache belong to one process")
        return Sessions, (self.settings,)

    def without_trace(self) -> Sessions:
        """Sessions for trials, which are neither cached nor written down; should one end the process, it is known."""
        return Sessions(self.settings, journal=self._journal)

    def create(self, model: bytes, inputs: Sequence[str], outputs: Sequence[str], name: str) -> Run:
        """A session for a model that was written in ONNX; `name` is what `engine.save_onnx` calls it."""
        session = self._made.get(model)
        if session is None or self._folder is not None:
            attempt = self._attempt(model, name)
            session = self._made[model] = _Watched(self._create(model, inputs, outputs, name, attempt), attempt)
        return session

    def try_out(self, model: bytes, name: str) -> None:
        """Raise what ONNX Runtime has against a small model."""
        attempt = self._attempt(model, name)
        with attempt.watched():
            place = self.settings.place
            Session(model, [], [], SessionSettings(threads=1, optimize=False, log_severity=4, place=place, whole=True))
        attempt.succeeded()

    def _attempt(self, model: bytes, name: str) -> Attempt:
        return self._journal.attempt(model, name) if self._journal is not None else Attempt()

    def _create(
        self, model: bytes, inputs: Sequence[str], outputs: Sequence[str], name: str, attempt: Attempt
    ) -> Session:
        if self._cache is None and self._folder is None:
            with attempt.watched():
                return Session(model, inputs, outputs, self.settings)
        optimized = self._optimized(model, attempt)
        if self._folder is not None:
            self._folder.write(name, "lowered", model)
            self._folder.write(name, "optimized", optimized)
        with attempt.watched():
            return Session(optimized, inputs, outputs, replace(self.settings, optimize=False))

    def _optimized(self, model: bytes, attempt: Attempt) -> bytes:
        kept = self._cache.get(model) if self._cache else None
        if kept is not None:
            return kept
        with attempt.watched():
            optimized = optimized_by(lambda path: Session(model, [], [], self.settings, optimized_path=path))
        if self._cache is not None:
            self._cache.put(model, optimized)
        return optimized


class _Watched:
    """A session whose runs are watched: the first one that succeeds by a file, the others in memory."""

    def __init__(self, session: Session, attempt: Attempt) -> None:
        self._session, self._attempt = session, attempt
        self._running: AbstractContextManager[None] | None = None

    def __call__(self, feeds: Sequence[OrtValue], into: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        if self._running is not None:
            with self._running:
                return self._session(feeds, into)
        with self._attempt.watched():
            results = self._session(feeds, into)
        self._attempt.succeeded()
        self._running = self._attempt.later_runs()
        return results
