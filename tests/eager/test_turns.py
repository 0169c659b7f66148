"""Turns of the engine and eager mode: the faster one runs nearly all steps."""

import random

import pytest

from ort_accel.eager.turns import MOST_PAIRS, Turns, is_clear


def race(engine, eager, steps, noise=0.0, seed=0):
    """Turns whose steps take `engine(step)` and `eager(step)` seconds; who ran each step, and the turns."""
    turns, draw, ran = Turns(), random.Random(seed), []
    for step in range(steps):
        in_eager = turns.next_is_eager()
        pace = (eager if in_eager else engine)(step) * (1 + noise * abs(draw.gauss(0, 1)))
        turns.took(pace, in_eager)
        ran.append(in_eager)
    return ran, turns


@pytest.mark.parametrize("factor", [0.3, 0.7, 0.9, 1.1, 1.3, 2.0])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_faster_one_runs_nearly_all_steps(factor, noise):
    ran, turns = race(lambda _: factor, lambda _: 1.0, 200, noise)
    assert turns.prefers_eager is (factor > 1)
    assert ran.count(factor > 1) >= 180


@pytest.mark.parametrize("factor", [1.02, 1.05, 1.2, 1.5, 2.0, 3.0])
def test_a_hundred_steps_take_at_most_three_percent_longer_than_eagers(factor):
    ran, _ = race(lambda _: factor, lambda _: 1.0, 100, noise=0.02)
    assert sum(1.0 if in_eager else factor for in_eager in ran) <= 103


@pytest.mark.parametrize("seed", range(20))
def test_under_heavy_noise_the_slower_one_does_not_stay(seed):
    """Steps that take up to several times as long by chance, as on a loaded machine."""
    ran, _ = race(lambda _: 0.5, lambda _: 1.0, 400, noise=1.0, seed=seed)
    assert sum(ran) < 100


def test_a_pace_that_changes_soon_after_the_decision_for_eager_mode_is_seen():
    ran, turns = race(lambda step: 3.0 if step < 12 else 1.0, lambda step: 1.0 if step < 12 else 4.0, 300)
    assert not turns.prefers_eager
    assert not any(ran[160:])


def test_a_machine_that_gets_loaded_changes_who_runs():
    ran, turns = race(lambda step: 0.8 if step < 100 else 3.0, lambda _: 1.0, 200)
    assert sum(ran[60:100]) <= 3
    assert turns.prefers_eager
    assert all(ran[130:160])


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_an_engine_that_has_become_faster_is_compared_anew_at_once(factor):
    _, turns = race(lambda _: 3.0, lambda _: 1.0, 60)
    assert turns.prefers_eager
    turns.begin_anew()
    assert not turns.is_decided
    assert turns.is_due
    ran = []
    for _ in range(20):
        in_eager = turns.next_is_eager()
        turns.took(1.0 if in_eager else factor, in_eager)
        ran.append(in_eager)
    assert sorted(ran[:2]) == [False, True]
    assert turns.is_decided
    assert turns.prefers_eager is (factor > 1)
    assert ran.count(factor > 1) >= 15


def test_a_pair_that_has_begun_is_not_compared_with_the_engine_before():
    turns = Turns()
    assert not turns.next_is_eager()
    turns.took(9.0, False)
    turns.begin_anew()
    for _ in range(4):
        in_eager = turns.next_is_eager()
        turns.took(1.0 if in_eager else 0.5, in_eager)
    assert turns.is_decided
    assert turns.ratio == 0.5


def test_a_single_slow_step_of_eager_mode_at_the_start_decides_nothing():
    ran, turns = race(lambda _: 1.4, lambda step: 10.0 if step == 1 else 1.0, 100)
    assert turns.prefers_eager
    assert sum(ran) >= 85


def test_a_comparison_ends_where_nobody_wins():
    ran, turns = race(lambda step: (0.99, 1.01)[step % 4 // 2], lambda _: 1.0, 2 * MOST_PAIRS)
    assert turns.is_decided
    assert turns.pairs == MOST_PAIRS
    assert sum(ran) == MOST_PAIRS


@pytest.mark.parametrize("seed", range(10))
def test_rare_very_slow_steps_count(seed):
    """Beside other load, threads that wait for each other make some eager steps take many times as long."""
    often = random.Random(seed)
    ran, _ = race(lambda _: 1.0, lambda _: 10.0 if often.random() < 0.25 else 0.9, 1000)
    assert sum(ran) < 300


def test_a_single_slow_pair_later_decides_nothing():
    slow = {17, 18, 19}
    ran, turns = race(lambda step: 5.0 if step in slow else 0.8, lambda _: 1.0, 120)
    assert not turns.prefers_eager
    assert sum(ran) < 20


def test_pairs_begin_with_either_in_turn():
    ran, _ = race(lambda _: 1.0, lambda _: 1.0, 8)
    assert ran == [False, True, True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("ratios", "clear"),
    [
        ([2.0], False),
        ([3.0], True),
        ([0.1], False),
        ([0.1, 0.6], True),
        ([2.0, 1.6], True),
        ([2.0, 1.2], False),
        ([0.9] * 4, True),
        ([1.02] * 3, False),
        ([1.01, 0.99] * 4, False),
    ],
)
def test_what_is_clear(ratios, clear):
    assert is_clear(ratios) is clear
