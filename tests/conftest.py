"""What tests of several rooms use."""

import gc
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch._dynamo.pgo import reset_code_state

from ort_accel.eager import comparison
from tests.pretend_cuda import cuda_device
from tests.shape_caches import clear_shape_caches

__all__ = ["cuda_device"]

WHY_NOT = comparison.why_not
TESTS_RUN = count(1)


def freeze_what_is_left() -> None:
    """Have the garbage collector pass over all objects that exist now."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Spare what takes long each time that a test compiles or sets a seed.

    The garbage collector walks through everything that was imported. `torch.manual_seed` formats the stack for each
    kind of device that is not there, to seed it later.
    """
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():
            devices.manual_seed_all = lambda seed: None
    freeze_what_is_left()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def key_of_tests(tmp_path_factory) -> Iterator[None]:
    """The key that kept graphs are signed with lies in a folder of the tests, for the processes they start, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def engine_runs_every_step(monkeypatch) -> None:
    """Tests are of the engine: its steps take no turns with eager mode's, but where a test asks for it."""
    monkeypatch.setattr(comparison, "why_not", lambda *_: "switched off for tests")


@pytest.fixture
def compared_with_eager(monkeypatch, engine_runs_every_step) -> None:
    """Steps are compared with eager mode's, as they are in a training."""
    monkeypatch.setattr(comparison, "why_not", WHY_NOT)


@pytest.fixture(autouse=True)
def earlier_tests_are_forgotten() -> Iterator[None]:
    """Keep compilations as fast as in the first test: each collects garbage, also of earlier ones."""
    yield
    clear_shape_caches()
    if next(TESTS_RUN) % 100 == 0:
        freeze_what_is_left()


@pytest.fixture(autouse=True)
def sizes_are_new() -> None:
    """Let each test meet sizes for the first time: torch 2.11 notes which sizes of a function change, of all models."""
    reset_code_state()
