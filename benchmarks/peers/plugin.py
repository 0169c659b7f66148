"""A pytest plugin that sends every model which a peer's tests train through the engine.

`benchmarks/peers/run.py` loads it by `-p`; ORT_ACCEL_PEERS names the way (`WAYS`), ORT_ACCEL_PEERS_OUT the file that
gets one line of JSON a test, as soon as the test is over, so that a run that is killed leaves what it found, and
ORT_ACCEL_PEERS_CHOICE a file that says which tests are to be run.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

QUIET = {"version": 1, "engine": {"compare_with_eager": False}, "observe": {"log_level": "fatal"}}

_REPORTS: list[Any] = []
"""The reports of all models that the running test has put on the engine."""


def stock() -> None:
    """Nothing is changed: the tests as they come."""


def by_callback() -> None:
    """Every Trainer, of whatever class, gets `ORTAccelCallback`."""
    from transformers import Trainer

    from ort_accel.hf import ORTAccelCallback

    original = Trainer.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def init(*args: Any, **named: Any) -> None:
        given = signature.bind(*args, **named)
        callbacks = given.arguments.get("callbacks") or []
        if not any(isinstance(one, ORTAccelCallback) for one in callbacks):
            given.arguments["callbacks"] = [ORTAccelCallback(QUIET), *callbacks]
        original(*given.args, **given.kwargs)

    Trainer.__init__ = init  # type: ignore[method-assign]


def by_launch() -> None:
    """Every Accelerator's `prepare` accelerates its models, as under `ort-accel launch`."""
    from ort_accel import load_config
    from ort_accel.hf.accelerate_hooks import hook_accelerators

    config = load_config(QUIET)
    hook_accelerators(lambda _: config)


def by_train() -> None:
    """A model of transformers or PEFT is accelerated when its `train()` is called, unless a bigger one calls it."""
    import peft
    import transformers

    is_within = False

    def accelerating(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def train(self: Any, mode: bool = True) -> Any:
            nonlocal is_within
            if is_within:
                return original(self, mode)
            is_within = True
            try:
                original(self, mode)
            finally:
                is_within = False
            return _accelerate(self) if mode else self

        return train

    for kind in (transformers.PreTrainedModel, peft.PeftModel, peft.PeftMixedModel):
        kind.train = accelerating(kind.train)  # type: ignore[method-assign]


WAYS = {"stock": stock, "callback": by_callback, "launch": by_launch, "train": by_train}


def _accelerate(model: Any) -> Any:
    from ort_accel import engine

    return engine.accelerate(model, QUIET)


def pytest_configure() -> None:
    """Set the way up before any test is imported."""
    way = os.environ["ORT_ACCEL_PEERS"]
    if way != "stock":
        _remember_reports()
    WAYS[way]()


def _remember_reports() -> None:
    """Keep the report of each model that anything puts on the engine."""
    from ort_accel.compiler import backend

    original = backend.Backend.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        _REPORTS.append(self.report)

    backend.Backend.__init__ = init  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what did not pass as it came, and what a process before this one has run."""
    choice = json.loads(Path(os.environ["ORT_ACCEL_PEERS_CHOICE"]).read_text())
    only, done = choice["only"], set(choice["done"])
    items[:] = [one for one in items if one.nodeid not in done and (only is None or one.nodeid in only)]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write one line a test: how it ended, how long it took, and how much of it ran on the engine."""
    _REPORTS.clear()
    began, item.stash[_ENDED] = time.perf_counter(), {"outcome": "passed"}
    _write({"test": item.nodeid, "outcome": "began"})
    yield
    engine = {"models": len(_REPORTS), "segments": sum(len(report.segments) for report in _REPORTS)}
    _write({"test": item.nodeid, **item.stash[_ENDED], "seconds": round(time.perf_counter() - began, 2), **engine})


_ENDED = pytest.StashKey[dict[str, str]]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note the first thing that did not pass."""
    result: Any = yield
    ended = result.get_result()
    if ended.outcome != "passed" and item.stash[_ENDED]["outcome"] == "passed":
        error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"[:400]
        item.stash[_ENDED] = {"outcome": ended.outcome, "error": error}


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ["ORT_ACCEL_PEERS_OUT"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
