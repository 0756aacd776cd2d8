"""The break-even batch is where a dense search finds the least time to target."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis.cost.step_time import fit_step_time
from batchscape.analysis.decisions.break_even import break_even_batch
from batchscape.analysis.tradeoff.fit import fit_tradeoff

BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)
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


def tradeoff(exponent=1.0, critical=200.0, *, noise=0.0, seeds=3, form=None, batches=BATCHES):
    rng = np.random.default_rng(1)
    rows = [
        (batch, seed, 100 * (1 + (critical / batch) ** exponent))
        for batch in batches
        for seed in range(seeds)
    ]
    table = pd.DataFrame(rows, columns=["global_batch_size", "seed", "steps_to_target"])
    table["steps_to_target"] *= np.exp(noise * rng.standard_normal(len(table)))
    return fit_tradeoff(table, form=form)


@pytest.mark.parametrize("exponent", [0.85, 1.0, 1.2])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("growth", ["accumulation", "micro"])
def test_it_is_the_minimum_of_time_to_target(devices, growth, exponent):
    even = break_even_batch(
        tradeoff(exponent), model(), devices=devices, micro_batch_size=8, growth=growth
    )
    batches = np.linspace(1, 5000, 500_000)
    if growth == "accumulation":
        times = step_time(devices, 8, batches / (8 * devices))
    else:
        times = step_time(devices, batches / devices, 1)
    best = batches[np.argmin((1 + (200 / batches) ** exponent) * times)]
    assert even.value == pytest.approx(best, rel=1e-3)


def test_the_two_term_form_has_a_closed_one():
    fit = tradeoff(noise=0.02, seeds=5, form="two_term")
    even = break_even_batch(fit, model(), devices=2, growth="micro")
    fixed, per_sample = ALPHA + EXCHANGE + UPDATE, BETA / 2
    critical = fit.critical_batch_size
    assert even.value == pytest.approx(math.sqrt(critical.value * fixed / per_sample), rel=1e-4)
    # Of exact times the interval is that of the root of the critical batch.
    assert even.high / even.value == pytest.approx(
        math.sqrt(critical.high / critical.value), rel=5e-3
    )
    wide = break_even_batch(fit, model(0.1), devices=2, growth="micro")
    assert wide.high / wide.low > even.high / even.low


@pytest.mark.slow
def test_the_interval_counts_the_exponent_too():
    """Against how far the place moves when one seed is left out (jackknife)."""
    rng = np.random.default_rng(4)
    steps = 100 * (1 + (200 / np.array(BATCHES)[:, None]) ** 0.85)
    steps = steps * np.exp(0.03 * rng.standard_normal((len(BATCHES), 10)))

    def found(seeds):
        rows = [
            (batch, seed, steps[row, seed]) for row, batch in enumerate(BATCHES) for seed in seeds
        ]
        columns = ["global_batch_size", "seed", "steps_to_target"]
        fit = fit_tradeoff(pd.DataFrame(rows, columns=columns))
        return break_even_batch(fit, model(), devices=1, growth="micro")

    truth = found(range(10))
    logs = [math.log(found([s for s in range(10) if s != out]).value) for out in range(10)]
    error = math.sqrt(9 * np.var(logs))
    assert truth.n == 10
    assert math.log(truth.high / truth.value) == pytest.approx(
        stats.t.ppf(0.975, 9) * error, rel=0.2
    )


def test_it_is_not_identified_without_its_parts():
    few = tradeoff(batches=(64, 128))
    no_batch = break_even_batch(few, model(), devices=1, micro_batch_size=8)
    assert "critical batch" in no_batch.note
    table = pd.DataFrame(
        {
            "data_parallel_size": 1,
            "micro_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "step_time_s": [1.0, 1.1],
        }
    )
    no_times = break_even_batch(tradeoff(), fit_step_time(table), devices=1, micro_batch_size=8)
    assert not no_times.is_identified
    assert "grows" in no_times.note
    one_seed = break_even_batch(tradeoff(seeds=1), model(), devices=1, micro_batch_size=8)
    assert one_seed.is_identified
    assert math.isnan(one_seed.low)
    assert "no interval" in one_seed.note


def test_what_is_open_by_orders_of_magnitude_is_not_identified():
    """Four cells and three terms leave one degree of freedom."""
    cells = [(1, 2, 1), (1, 8, 1), (1, 32, 1), (1, 2, 4)]
    names = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps", "step_time_s"]

    def found(off):
        rows = [(*cut, step_time(*cut) * (1 + off * (cut[1] == 8))) for cut in cells]
        model = fit_step_time(pd.DataFrame(rows, columns=names))
        return break_even_batch(tradeoff(), model, devices=1, growth="micro")

    sure, open_ = found(0.002), found(0.3)
    assert sure.high / sure.value < 10
    assert not open_.is_identified
    assert open_.note == "not identified: these steps and times leave it open by more than 10 times"


def test_an_exchange_that_was_not_measured_is_not_taken_as_free():
    cells = [(1, m, a, step_time(1, m, a)) for m in (2, 8, 32) for a in (1, 4)]
    names = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps", "step_time_s"]
    alone = fit_step_time(pd.DataFrame(cells, columns=names))
    even = break_even_batch(tradeoff(), alone, devices=2, micro_batch_size=8)
    assert "exchange" in even.note
    assert not even.is_identified
