"""Plots: values stand where they belong, axes have round numbers, and nothing is drawn outside."""

import math

import pytest

from ort_accel.observe.axes import HEIGHT, LEFT, WIDTH, horizontal_axis, short, vertical_axis
from ort_accel.observe.charts import Line, Mark, line_chart
from ort_accel.observe.page import page
from tests.observe.pages import read


def plot(*lines, **more):
    chart = line_chart("caption", [Line(str(n), points) for n, points in enumerate(lines)], "x", "y", **more)
    return read(page("title", "", chart)).plots["caption"]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0, 1], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([3, 97], [0, 20, 40, 60, 80, 100]),
        ([-5, 5], [-4, -2, 0, 2, 4]),
        ([], [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_an_upright_axis_begins_at_zero_and_has_round_numbers(values, ticks):
    assert vertical_axis(values, logarithmic=False).ticks() == pytest.approx(ticks)


def test_a_logarithmic_axis_has_powers_of_ten():
    assert vertical_axis([0.0, 0.02, 30.0], logarithmic=True).ticks() == pytest.approx([0.01, 0.1, 1, 10, 100])


@pytest.mark.parametrize("last", [1, 2, 3, 7, 10, 99, 12_345])
def test_steps_are_numbered_by_whole_numbers(last):
    ticks = horizontal_axis(range(last + 1)).ticks()
    assert all(tick == int(tick) for tick in ticks)
    assert 2 <= len(ticks) <= 11


def test_points_stand_in_proportion():
    [points] = plot([(0, 0.0), (1, 1.0), (2, 2.0), (4, 4.0)]).points
    (x0, y0), (x1, y1), _, (x4, y4) = points
    assert x4 - x0 == pytest.approx(4 * (x1 - x0), abs=0.4)
    assert y4 - y0 == pytest.approx(4 * (y1 - y0), abs=0.4)
    assert y4 < y0


@pytest.mark.parametrize("logarithmic", [False, True])
def test_nothing_is_drawn_outside_and_what_is_not_finite_is_left_out(logarithmic):
    values = [0.0, -3.0, math.nan, math.inf, 1e-30, 1e30]
    [points] = plot(list(enumerate(values)), logarithmic=logarithmic, marks=[Mark("m", 5.0)]).points
    assert len(points) == 4
    assert all(LEFT <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


def test_marks_are_named():
    assert {"rounding", "the module"} <= set(
        plot([(0, 1.0), (1, 2.0)], marks=[Mark("rounding", 1.5), Mark("the module", 1, across=True)]).words
    )


def test_several_lines_have_a_key_and_differ_in_more_than_colour():
    html = line_chart("c", [Line("one", [(0, 1.0)]), Line("two", [(0, 2.0)])], "x", "y")
    assert html.count('class="key"') == 2
    assert html.count("stroke-dasharray") == 2


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (1234.0, "1234"), (45_678, "45.7k"), (3e9, "3G"), (2e-5, "2e-5")]
)
def test_numbers_are_short(value, text):
    assert short(value) == text
