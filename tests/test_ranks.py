"""Processes that hang are stopped and show where they were."""

import sys
import time

import pytest

from tests.ranks import run_ranks

HANGS = 3600


def main(rank, behaviour):
    if rank == 1 and behaviour == "fails":
        raise RuntimeError("the first mistake")
    if behaviour != "ends":
        time.sleep(HANGS)


def test_processes_that_end_are_silent():
    run_ranks("tests.test_ranks", "ends")


def test_a_hang_is_stopped_with_the_stacks_of_all_processes():
    found = 0
    for timeout in (3.0, 60.0):  # a busy machine may need longer before both have begun
        with pytest.raises(AssertionError) as caught:
            run_ranks("tests.test_ranks", "hangs", timeout=timeout)
        found = str(caught.value).count("in main")
        if found == 2:
            break
    assert found == 2


def test_the_others_do_not_wait_for_one_that_failed(monkeypatch):
    monkeypatch.setattr("tests.ranks.GRACE", 1.0)
    with pytest.raises(AssertionError) as caught:
        run_ranks("tests.test_ranks", "fails")
    assert "the first mistake" in str(caught.value)
    assert "rank 0 ended with -6" in str(caught.value)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
