"""Readings of a headline: which disagree, and what is then shown."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis.estimates import Estimate
from batchscape.analysis.report.macros import macros
from batchscape.analysis.targets.readings import (
    Reading,
    at_first_crossing,
    halves_of_seeds,
    under_readings,
)

HEADLINE = Estimate(15.0, 13.6, 16.5, 5, "", "t", "ratio")


def mean_of(logs: np.ndarray) -> Estimate:
    low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
    values = (math.exp(value) for value in (logs.mean(), low, high))
    return Estimate(*values, len(logs), "", "t", "ratio")


def test_readings_within_the_interval_leave_the_headline_alone():
    inside = replace(HEADLINE, value=14.0)
    assert under_readings(HEADLINE, [Reading("at the first crossing", inside)]) is HEADLINE
    assert under_readings(HEADLINE, []) is HEADLINE


def test_a_reading_beyond_the_interval_shows_the_range():
    """The figures of a sweep whose losses cross the target again and again."""
    readings = [
        Reading("at the first crossing", replace(HEADLINE, value=4.81, low=3.57, high=6.47)),
        Reading("at a loss of 0.42", replace(HEADLINE, value=5.91)),
    ]
    headline = under_readings(HEADLINE, readings)
    assert headline.text() == "4.81 to 15.0"
    assert headline.note is not None
    assert headline.note.endswith(
        "15.0 for good, 4.81 at the first crossing, 5.91 at a loss of 0.42"
    )
    text = macros({"steps_ratio": headline})
    assert r"\newcommand{\bsStepsRatio}{\mbox{4.81 to 15.0}}" in text
    assert r"\newcommand{\bsStepsRatioText}{4.81 to 15.0}" in text


def test_bounds_that_contradict_leave_nothing_identified():
    bound = replace(HEADLINE, value=math.nan, low=0.0, high=9.0)
    headline = under_readings(HEADLINE, [Reading("at the first crossing", bound)])
    assert not headline.is_identified
    assert "at most 9.00 at the first crossing" in str(headline.note)
    open_end = replace(bound, high=math.inf)
    assert under_readings(HEADLINE, [Reading("at the first crossing", open_end)]) is HEADLINE


def test_halves_have_three_seeds_at_least():
    def seeds(n: int) -> pd.DataFrame:
        return pd.DataFrame({"seed": np.repeat(np.arange(n), 2)})

    assert [len(halves_of_seeds(seeds(n))) for n in (3, 4, 5, 6, 9)] == [0, 0, 1, 2, 2]
    assert [name for name, _ in halves_of_seeds(seeds(6))] == ["by seeds 0 to 2", "by seeds 3 to 5"]
    assert at_first_crossing(seeds(3)) is None


@pytest.mark.parametrize("n", [8, 10, 20])
def test_halves_disagree_rarely_by_noise_and_mostly_where_they_differ(n):
    rng = np.random.default_rng(1)
    fired = {0.0: 0, math.log(3): 0}
    for apart in fired:
        for _ in range(200):
            logs = 0.1 * rng.standard_normal(n) + apart * (np.arange(n) < n // 2)
            halves = [
                Reading(str(i), mean_of(half), of_half=True)
                for i, half in enumerate(np.split(logs, [n // 2]))
            ]
            fired[apart] += bool(under_readings(mean_of(logs), halves).readings)
    assert fired[0.0] <= 0.04 * 200
    assert fired[math.log(3)] >= 0.9 * 200
