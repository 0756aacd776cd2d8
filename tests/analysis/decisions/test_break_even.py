"""The break-even batch is where a dense search finds the least time to target."""

import math

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.cost.step_time import fit_step_time
from batchscape.analysis.decisions.break_even import break_even_batch
from batchscape.analysis.estimates import Estimate

ALPHA, BETA, EXCHANGE, UPDATE = 2e-3, 3e-3, 0.2, 0.1


def step_time(d, m, a):
    return a * (ALPHA + BETA * m) + EXCHANGE * 2 * (d - 1) / d + UPDATE


def model(noise=0.0):
    rng = np.random.default_rng(0)
    cells = [(d, m, a) for d in (1, 2, 4) for m in (2, 8, 32) for a in (1, 4)]
    rows = [
        (d, m, a, step_time(d, m, a) * math.exp(noise * rng.standard_normal())) for d, m, a in cells
    ]
    names = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps", "step_time_s"]
    return fit_step_time(pd.DataFrame(rows, columns=names))


def critical(value=200.0, low=150.0, high=260.0):
    return Estimate(value, low, high, 5, "samples", "", "")


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("growth", ["accumulation", "micro"])
def test_it_is_the_minimum_of_time_to_target(devices, growth):
    found = break_even_batch(
        critical(), model(), devices=devices, micro_batch_size=8, growth=growth
    )
    batches = np.linspace(1, 5000, 500_000)
    if growth == "accumulation":
        times = step_time(devices, 8, batches / (8 * devices))
    else:
        times = step_time(devices, batches / devices, 1)
    best = batches[np.argmin((1 + 200 / batches) * times)]
    assert found.value == pytest.approx(best, rel=1e-3)


def test_the_interval_is_that_of_the_critical_batch_where_times_are_exact():
    found = break_even_batch(critical(), model(), devices=2, micro_batch_size=8)
    assert found.low / found.value == pytest.approx(math.sqrt(150 / 200), rel=1e-4)
    assert found.high / found.value == pytest.approx(math.sqrt(260 / 200), rel=1e-4)
    wide = break_even_batch(critical(), model(0.1), devices=2, micro_batch_size=8)
    assert wide.high / wide.low > found.high / found.low


def test_it_is_not_identified_without_its_parts():
    no_batch = break_even_batch(
        critical(math.nan, math.nan, math.nan), model(), devices=1, micro_batch_size=8
    )
    assert "critical batch" in no_batch.note
    table = pd.DataFrame(
        {
            "data_parallel_size": 1,
            "micro_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "step_time_s": [1.0, 1.1],
        }
    )
    no_times = break_even_batch(critical(), fit_step_time(table), devices=1, micro_batch_size=8)
    assert not no_times.is_identified
    assert "grows" in no_times.note
    open_end = break_even_batch(critical(200, 0, math.inf), model(), devices=1, micro_batch_size=8)
    assert (open_end.low, open_end.high) == (0, math.inf)


def test_an_exchange_that_was_not_measured_is_not_taken_as_free():
    cells = [(1, m, a, step_time(1, m, a)) for m in (2, 8, 32) for a in (1, 4)]
    names = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps", "step_time_s"]
    alone = fit_step_time(pd.DataFrame(cells, columns=names))
    found = break_even_batch(critical(), alone, devices=2, micro_batch_size=8)
    assert "exchange" in found.note
    assert not found.is_identified
