"""The loss scale follows its rules, whatever the order of overflows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_accel.config.sections import Fp16
from ort_accel.errors import OptimizerError
from ort_accel.optim import LossScale


def reference(history, scale, growth, backoff, window, hysteresis, minimum):
    """The scale after a history of steps, each True for an overflow, worked out from the history alone."""
    scales = []
    last_change = 0
    for now, overflow in enumerate(history):
        run = 0
        while run <= now and history[now - run]:
            run += 1
        if overflow:
            last_change = now + 1
            if run >= hysteresis:
                scale = max(minimum, scale * backoff)
        elif (now + 1 - last_change) % window == 0 and scale * growth <= 3.4028234663852886e38:
            scale = scale * growth
        scales.append(scale)
    return scales


@settings(max_examples=300, deadline=None)
@given(
    history=st.lists(st.booleans(), max_size=60),
    scale=st.floats(1.0, 1e38),
    growth=st.floats(1.01, 8.0),
    backoff=st.floats(0.1, 0.99),
    window=st.integers(1, 7),
    hysteresis=st.integers(1, 4),
    minimum=st.floats(0.01, 1.0),
)
def test_any_history_gives_the_scale_of_the_rules(history, scale, growth, backoff, window, hysteresis, minimum):
    wanted = reference(history, scale, growth, backoff, window, hysteresis, minimum)
    mine = LossScale(scale, growth, backoff, window, hysteresis, minimum)
    seen = []
    for position, overflow in enumerate(history):
        if position == len(history) // 2:
            resumed = LossScale(scale, growth, backoff, window, hysteresis, minimum)
            resumed.load_state_dict(mine.state_dict())
            mine = resumed
        mine.update(overflow)
        seen.append(mine.scale)
    assert seen == wanted


def test_the_configuration_is_followed():
    fp16 = Fp16(initial_scale=8.0, growth_factor=4.0, backoff_factor=0.25, window=2, hysteresis=2, min_scale=1.0)
    scale = LossScale.from_config(fp16)
    for overflow in (False, False, True, True, True, True):
        scale.update(overflow)
    assert scale.scale == 1.0
    assert LossScale.from_config(Fp16()) == LossScale()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": 0.0}, "scale of a loss scale is 0.0"),
        ({"scale": float("inf")}, "scale of a loss scale is inf"),
        ({"growth_factor": 1.0}, "growth_factor of a loss scale is 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor of a loss scale is 1.0"),
        ({"window": 0}, "window of a loss scale is 0"),
        ({"hysteresis": 0}, "hysteresis of a loss scale is 0"),
        ({"scale": 2.0, "min_scale": 4.0}, "min_scale of a loss scale is 4.0; it must be above 0 and at most"),
    ],
)
def test_invalid_loss_scale_settings_are_refused(wrong, message):
    with pytest.raises(OptimizerError, match=message):
        LossScale(**wrong)


def test_a_state_with_more_good_steps_than_a_new_window_grows_at_the_next_one():
    resumed = LossScale(1024.0, window=1000)
    resumed.load_state_dict({"scale": 1024.0, "good_steps": 1500, "overflows": 0})
    resumed.update(overflow=False)
    assert (resumed.scale, resumed.good_steps) == (2048.0, 0)
