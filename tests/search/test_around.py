"""The grid around the best: within the interval, in order, and bracketed on both sides."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchscape.plan.expand import Interval
from batchscape.search.grid import Bracket, bracket, points_around, values_beyond

RATE = Interval("rate", 1e-4, 1e-1, is_log=True)
DECAY = Interval("decay", 0.0, 0.5, is_log=False)
WIDTH = Interval("width", 1, 64, is_log=True)


def test_values_of_a_logarithmic_interval_have_one_ratio():
    points = points_around([RATE], {"rate": 0.00312345}, 5, 2.0)
    assert [point["rate"] for point in points] == [0.00312, 0.000781, 0.00156, 0.00625, 0.0125]


def test_values_of_another_interval_are_a_tenth_of_it_apart():
    points = points_around([DECAY], {"decay": 0.2}, 3, 1.5)
    assert sorted(point["decay"] for point in points) == pytest.approx([0.15, 0.2, 0.25])


def test_each_interval_is_varied_by_itself():
    best = {"rate": 1e-2, "decay": 0.25, "name": "adamw"}
    points = points_around([RATE, DECAY], best, 3, 2.0)
    assert points[0] == best
    assert len(points) == 5
    assert all(sum(point[key] != best[key] for key in best) == 1 for point in points[1:])


@given(
    st.integers(1, 64),
    st.integers(1, 9),
    st.floats(1.01, 3.0, allow_nan=False),
)
def test_whole_numbers_stay_whole_within_and_apart(best, points, ratio):
    values = [point["width"] for point in points_around([WIDTH], {"width": best}, points, ratio)]
    assert all(isinstance(value, int) and 1 <= value <= 64 for value in values)
    assert len(set(values)) == len(values)
    assert best in values


@given(st.floats(1e-4, 1e-1), st.integers(1, 9), st.floats(1.05, 4.0))
def test_no_value_leaves_its_interval(best, points, ratio):
    values = [point["rate"] for point in points_around([RATE], {"rate": best}, points, ratio)]
    assert all(1e-4 <= value <= 1e-1 for value in values)
    assert values[0] == pytest.approx(best, rel=0.006)


@given(st.dictionaries(st.floats(1e-4, 1e-1), st.floats(0, 10), min_size=1))
def test_a_bracket_is_the_least_and_its_neighbours(losses):
    measured = bracket(losses)
    assert losses[measured.best] == min(losses.values())
    lower = [value for value in losses if value < measured.best]
    higher = [value for value in losses if value > measured.best]
    assert measured.low == max(lower, default=None)
    assert measured.high == min(higher, default=None)


def test_only_an_open_side_is_widened():
    assert values_beyond(RATE, Bracket(1e-3, 2e-3, 4e-3), 2.0) == []
    assert values_beyond(RATE, Bracket(None, 2e-3, 4e-3), 2.0) == [1e-3, 5e-4]
    assert values_beyond(RATE, Bracket(1e-3, 2e-3, None), 2.0) == [4e-3, 8e-3]


def test_at_the_end_of_an_interval_there_is_nothing_to_add():
    assert values_beyond(RATE, Bracket(5e-2, 1e-1, None), 2.0) == []
    assert values_beyond(RATE, Bracket(4e-2, 8e-2, None), 2.0) == [1e-1]


@given(st.floats(2e-4, 5e-2), st.floats(-3.9, -1.1))
def test_widening_finds_the_least_of_a_parabola(start, log_optimum):
    """However far off the trials were, the grid walks to a bracket of the true optimum."""

    def loss(rate):
        return (math.log10(rate) - log_optimum) ** 2

    values = [point["rate"] for point in points_around([RATE], {"rate": start}, 5, 1.5)]
    for _ in range(40):
        measured = bracket({value: loss(value) for value in values})
        more = values_beyond(RATE, measured, 1.5)
        if not more:
            break
        values += more
    assume(measured.low is not None and measured.high is not None)
    assert measured.low <= 10**log_optimum * 1.01
    assert measured.high >= 10**log_optimum / 1.01


def test_a_narrow_interval_of_large_numbers_keeps_its_distances():
    beta = Interval("beta2", 0.999, 0.9999, is_log=False)
    values = sorted(point["beta2"] for point in points_around([beta], {"beta2": 0.99945}, 5, 1.5))
    assert values == pytest.approx([0.99927, 0.99936, 0.99945, 0.99954, 0.99963], abs=1e-9)
