"""Gain of a batch size that follows the noise scale, against integrals in closed form."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import trapezoid

from batchscape.analysis.tradeoff.schedule import batch_schedule_gain, schedule_gain
from batchscape.errors import AnalysisError


def test_square_root_growth_gains_exactly_24_25ths():
    s = np.linspace(0, 1, 200_001) ** 4
    assert schedule_gain(s, 300 * np.sqrt(s)).gamma == pytest.approx(24 / 25, abs=1e-9)


def test_linear_growth_gains_8_9ths_on_two_points():
    # (integral of sqrt(s))^2 / integral of s = (4/9) / (1/2).
    found = schedule_gain([0, 10], [0, 70])
    assert found.gamma == pytest.approx(8 / 9, rel=1e-12)
    assert (found.s_min, found.e_min) == (10, 350)


@given(st.lists(st.floats(0.1, 1e4), min_size=2, max_size=20), st.floats(0.01, 100))
def test_gain_is_at_most_one_and_has_no_unit(scale, unit):
    s = np.arange(len(scale), dtype=float)
    found = schedule_gain(s, scale)
    assert 0 < found.gamma <= 1 + 1e-12
    assert schedule_gain(s * unit, np.array(scale) / unit).gamma == pytest.approx(found.gamma)
    assert schedule_gain(s, np.full(len(s), scale[0])).gamma == pytest.approx(1)


def test_schedule_has_the_stated_product_of_excesses():
    s = np.linspace(0, 100, 100_001)
    scale = 10 + s
    found = schedule_gain(s, scale)
    sizes = found.batch_sizes(40.0)
    assert sizes**2 == pytest.approx(40 * scale)
    steps = trapezoid(1 + scale / sizes, s)
    samples = trapezoid(sizes + scale, s)
    product = (steps / found.s_min - 1) * (samples / found.e_min - 1)
    assert product == pytest.approx(found.gamma, rel=1e-8)
    assert found.saving == pytest.approx((1 - math.sqrt(product)) / 2)


def test_recorded_curve_is_turned_into_progress():
    # At a constant noise scale equal to the batch size a step makes half a step of progress.
    curve = pd.DataFrame({"samples": [64, 128, 640, 700], "estimate": [64.0, 64, 64, math.nan]})
    found = batch_schedule_gain(curve, batch_size=64)
    assert found.s_min == pytest.approx(4.5)
    assert found.e_min == pytest.approx(4.5 * 64)
    assert found.gamma == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: schedule_gain([0], [1]), "two points"),
        (lambda: schedule_gain([0, 0], [1, 1]), "rise"),
        (lambda: schedule_gain([0, 1], [1, -1]), "above zero"),
        (lambda: schedule_gain([0, 1], [1, 2]).batch_sizes(0), "above zero"),
        (lambda: batch_schedule_gain(pd.DataFrame({"samples": [1]}), batch_size=1), "missing"),
        (
            lambda: batch_schedule_gain(
                pd.DataFrame({"samples": [1, 2], "estimate": [1, 1]}), batch_size=0
            ),
            "batch_size",
        ),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(AnalysisError, match=words):
        call()
