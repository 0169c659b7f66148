"""Creation of sessions: from the cache where it has the model, and with a copy on disk where one is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from ort_accel.errors import OrtAccelError
from ort_accel.files import write_aside
from ort_accel.runtime.crash_journal import Attempt, CrashJournal
from ort_accel.runtime.dlpack import OrtValue
from ort_accel.runtime.model_cache import ModelCache, optimized_model
from ort_accel.runtime.session import LOG_FATAL, Session, SessionSettings


class ModelFolder:
    """The folder of `engine.save_onnx`, to which models are written under readable names."""

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
    """A callable that runs a model."""

    def __call__(self, feeds: Sequence[OrtValue]) -> list[torch.Tensor]:
        """Run on these inputs, and write the results into `into` if it is given."""


class Sessions:
    """Creates the sessions of one model. Equal segments, such as those of equal layers, share a session."""

    def __init__(
        self,
        settings: SessionSettings,
        cache: ModelCache | None = None,
        folder: ModelFolder | None = None,
        journal: CrashJournal | None = None,
    ) -> None:
        self.settings = settings
        self._cache, self._folder, self._journal = cache, folder, journal
        self._sessions: WeakValueDictionary[bytes, _JournaledSession] = WeakValueDictionary()

    def __reduce__(self) -> tuple[type[Sessions], tuple[SessionSettings]]:
        if self._cache or self._folder or self._journal:
            raise TypeError("sessions with a cache belong to one process")
        return Sessions, (self.settings,)

    def without_trace(self) -> Sessions:
        """Returns sessions for trials: not cached and not saved, but with the crash journal."""
        return Sessions(self.settings, journal=self._journal)

    def create(self, model: bytes, inputs: Sequence[str], outputs: Sequence[str], name: str) -> Run:
        """Returns a session for an ONNX model; `engine.save_onnx` and messages call it `name`."""
        session = self._sessions.get(model)
        if session is None or self._folder is not None:
            attempt = self._attempt(model, name)
            session = self._sessions[model] = _JournaledSession(
                self._create(model, inputs, outputs, name, attempt), attempt
            )
        return session

    def try_out(self, model: bytes, name: str) -> None:
        """Create a session of a small model, and raise ONNX Runtime's error if it refuses the model."""
        attempt = self._attempt(model, name)
        with attempt.first_use():
            settings = SessionSettings(
                threads=1,
                optimize=False,
                log_severity=LOG_FATAL,
                place=self.settings.place,
                refuse_cpu_nodes=True,
            )
            Session(model, [], [], settings)
        attempt.succeeded()

    def _attempt(self, model: bytes, name: str) -> Attempt:
        return self._journal.attempt(model, name) if self._journal is not None else Attempt()

    def _create(
        self, model: bytes, inputs: Sequence[str], outputs: Sequence[str], name: str, attempt: Attempt
    ) -> Session:
        if self._cache is None and self._folder is None:
            with attempt.first_use():
                return Session(model, inputs, outputs, self.settings)
        optimized = self._optimized(model, attempt)
        if self._folder is not None:
            self._folder.write(name, "lowered", model)
            self._folder.write(name, "optimized", optimized)
        with attempt.first_use():
            return Session(optimized, inputs, outputs, replace(self.settings, optimize=False))

    def _optimized(self, model: bytes, attempt: Attempt) -> bytes:
        cached = self._cache.get(model) if self._cache else None
        if cached is not None:
            return cached
        with attempt.first_use():
            optimized = optimized_model(lambda path: Session(model, [], [], self.settings, optimized_path=path))
        if self._cache is not None:
            self._cache.put(model, optimized)
        return optimized


class _JournaledSession:
    """A session whose runs are in the crash journal: up to the first success by a file, then on the crash page."""

    def __init__(self, session: Session, attempt: Attempt) -> None:
        self._session, self._attempt = session, attempt
        self._later_runs: AbstractContextManager[None] | None = None

    def __call__(self, feeds: Sequence[OrtValue]) -> list[torch.Tensor]:
        if self._later_runs is not None:
            with self._later_runs:
                return self._session(feeds)
        with self._attempt.first_use():
            results = self._session(feeds)
        self._attempt.succeeded()
        self._later_runs = self._attempt.later_runs()
        return results
