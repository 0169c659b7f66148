"""The heap is trimmed if the resident set exceeds its limit, and only then."""

import pytest

from ort_accel.memory import low_memory_mode
from ort_accel.memory.low_memory_mode import TrimOnGrowth
from ort_accel.memory.process_memory import resident, resident_now


class Process:
    """A process with a resident set, some of which is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.free, self.returned = 0, 0, 0
        monkeypatch.setattr(low_memory_mode, "resident_now", lambda: self.held)
        monkeypatch.setattr(low_memory_mode, "trim_heap", self._give_back)

    def _give_back(self) -> None:
        self.returned += 1
        self.held, self.free = self.held - self.free, 0


def test_equal_steps_stop_trimming(monkeypatch):
    process, look, after = Process(monkeypatch), TrimOnGrowth(), []
    for _ in range(4):
        for needed in (100, 200, 300, 200):
            process.held = max(process.held, needed)  # freed blocks stay, and are used again
            process.free = process.held - needed
            look()
        after.append(process.returned)
    assert after == [3, 3, 3, 3]


def test_trimming_returns_free_memory_and_raises_the_limit(monkeypatch):
    process, look = Process(monkeypatch), TrimOnGrowth()
    process.held = 1000
    look()
    process.held, process.free = 1040, 60
    look()
    assert (process.held, process.returned) == (1040, 1), "a little more may be held"
    process.held, process.free = 1060, 80
    look()
    assert (process.held, process.returned) == (980, 2)
    process.held, process.free = 1200, 0
    look()
    process.held = 1250
    look()
    assert process.returned == 3, "what was needed once may be held again"


def test_nothing_is_trimmed_if_the_resident_set_is_unknown(monkeypatch):
    process, look = Process(monkeypatch), TrimOnGrowth()
    look()
    assert process.returned == 0


def test_both_readings_of_the_resident_set_agree():
    if resident() is None:
        pytest.skip("this system does not tell")
    assert resident_now() == pytest.approx(resident(), rel=0.02)
