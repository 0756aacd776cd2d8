"""How often the intervals hold the truth, over simulated sweeps whose optimum is known.

Each sweep has six global batches whose optima follow the root of the batch and lie anywhere
between the points of the grid. Seeds differ in level, in all of their runs alike, in the rate that
they want themselves (shared by all batches), and by noise.
"""

import math

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.learning_rate.exponent import exponent_of
from batchscape.analysis.learning_rate.lowest_point import optimum_of

SWEEPS = 400
SOME_SWEEPS = 150
BATCHES = 4.0 ** np.arange(6)


def bowl(distance):
    return distance**2 / 2


def slope(distance):
    """Falls slowly, rises fast."""
    return np.exp(distance) - distance - 1


def quadratic(distance):
    """Logarithm of the steps of a noisy quadratic, at exp(distance) times its best rate.

    The gain of a step is 2 c - c^2 of the best one's: McCandlish et al. 2018, section 2.2.
    """
    gain = 2 * np.exp(distance) - np.exp(2 * distance)
    return np.where(gain > 0, -np.log(np.maximum(gain, 1e-12)), np.inf)


def linear(distance):
    """A parabola in the rate itself."""
    return (np.exp(distance) - 1) ** 2 / 2


def steep(distance):
    """A parabola with a wall: from 1.35 times the best rate on it rises 40 times as fast."""
    return distance**2 / 2 + 20 * np.maximum(distance - 0.3, 0) ** 2


def exponent_from(batches, optima, shift):
    """Estimate an exponent from optima, each moved by a shift of its own."""
    table = pd.DataFrame(optima, columns=["learning_rate", "low", "high"], dtype=float)
    with np.errstate(over="ignore"):
        table = np.exp(table.add(shift, axis=0))
    return exponent_of(table.assign(global_batch_size=batches))


def covered(curve, *, n, noise, factor, correlated, sweeps=SWEEPS):
    """Share of intervals that hold the optimum of a batch, and of those that hold the exponent."""
    rng = np.random.default_rng(11)
    points = np.arange(-6, 7) * math.log(factor)
    held, exponents = [], []
    for _ in range(sweeps):
        shared_noise = 0.1 * rng.standard_normal((n, 1)) if correlated else np.zeros((n, 1))
        level = rng.standard_normal((n, 1))
        optima = []
        places = rng.uniform(-0.5, 0.5, len(BATCHES)) * math.log(factor)
        for best in places:
            costs = curve(points - best - shared_noise) + level
            costs += noise * rng.standard_normal(costs.shape)
            optimum = optimum_of(points, costs)
            held.append(optimum.low <= best <= optimum.high)
            optima.append((optimum.value, optimum.low, optimum.high))
        exponent = exponent_from(BATCHES, optima, 0.5 * np.log(BATCHES) - places)
        exponents.append(exponent.low <= 0.5 <= exponent.high)
    return float(np.mean(held)), float(np.mean(exponents))


def found_optima(curve, *, factor, noise, n, sweeps):
    """Mean error of the logarithm of the optimum, and the share of intervals that hold it."""
    rng = np.random.default_rng(13)
    points = np.arange(-6, 7) * math.log(factor)
    errors, held = [], []
    for best in rng.uniform(-0.5, 0.5, sweeps) * math.log(factor):
        costs = curve(points - best) + rng.standard_normal((n, 1))
        optimum = optimum_of(points, costs + noise * rng.standard_normal(costs.shape))
        errors.append(optimum.value - best)
        held.append(optimum.low <= best <= optimum.high)
    return float(np.mean(errors)), float(np.mean(held))


def test_a_parabola_in_the_rate_has_no_bias():
    error, held = found_optima(linear, factor=2, noise=0.05, n=3, sweeps=60)
    assert abs(error) < 0.03
    assert held > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "n"), [(0.001, 3), (0.2, 5)])
@pytest.mark.parametrize("factor", [2, math.sqrt(10)])
@pytest.mark.parametrize("curve", [bowl, linear, slope, steep, quadratic])
def test_bias_and_coverage_by_shape_and_grid(curve, factor, noise, n):
    error, held = found_optima(curve, factor=factor, noise=noise, n=n, sweeps=SOME_SWEEPS)
    # On a coarse grid nothing tells where between two rates a wall stands.
    walled = curve in {steep, quadratic} and factor > 3
    assert abs(error) < (0.2 if walled else 0.08)
    # At a steep wall fewer are known to; elsewhere 97 to 100 % (91 % on the coarsest grid), less
    # the Monte Carlo error of so many sweeps.
    least = 0.85 if curve is steep else 0.93 - math.sqrt(0.93 * 0.07 / SOME_SWEEPS)
    assert held >= least


def on_a_narrow_grid(*, truth, curve, depth, noise, n, points, sweeps):
    """Exponents of sweeps whose seven batches all have the same rates, of a factor of 4 in all."""
    rng = np.random.default_rng(12)
    batches = 2.0 ** np.arange(1, 8)
    logs = np.log(batches) - np.log(batches).mean()
    estimates = []
    for _ in range(sweeps):
        level = 0.1 * rng.standard_normal((n, 1))
        middle = rng.uniform(-0.5, 0.5) * (points[1] - points[0])
        optima = [
            optimum_of(
                points,
                depth * curve(points - middle - truth * log)
                + level
                + noise * rng.standard_normal((n, len(points))),
            )[1:4]
            for log in logs
        ]
        estimates.append(exponent_from(batches, optima, 0.0))
    return [exponent for exponent in estimates if exponent.is_identified]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curve", "noise", "factor", "n", "correlated"),
    [
        (bowl, 0.2, math.sqrt(2), 3, True),
        (bowl, 0.2, math.sqrt(2), 10, False),
        (slope, 0.1, 2, 3, True),
        (quadratic, 0.1, 2, 10, False),
    ],
)
def test_intervals_hold_the_truth(curve, noise, factor, n, correlated):
    optimum, exponent = covered(curve, n=n, noise=noise, factor=factor, correlated=correlated)
    # A grid of a factor of 2 bounds the optimum less finely than the seeds do, and its share of the
    # interval is no matter of chance: it may hold the optimum always, never less than 90 %.
    assert optimum >= 0.9
    assert 0.9 <= exponent <= 0.99


def test_a_few_sweeps_hold_the_truth():
    optimum, exponent = covered(bowl, n=3, noise=0.1, factor=2, correlated=True, sweeps=20)
    assert optimum > 0.85
    assert exponent > 0.75


@pytest.mark.slow
@pytest.mark.parametrize(
    ("curve", "depth", "noise", "n", "truth", "rates"),
    [
        (bowl, 0.1, 0.05, 3, 0.0, 3),
        (bowl, 0.1, 0.05, 5, 0.5, 5),
        (bowl, 1, 0.1, 5, 0.5, 3),
        (bowl, 1, 0.1, 5, 0.0, 5),
        (slope, 1, 0.2, 5, 0.0, 3),
        (slope, 1, 0.2, 3, 0.5, 5),
    ],
)
def test_flat_curves_on_a_narrow_grid_give_no_exponent_near_zero(
    curve, depth, noise, rates, truth, n
):
    """The best rate of such a grid lies near its middle at every batch, whatever the truth.

    Counting every optimum inside its grid held the truth in as few as 31 % of sweeps.
    """
    points = np.linspace(-math.log(2), math.log(2), rates)
    estimates = on_a_narrow_grid(
        truth=truth, curve=curve, depth=depth, noise=noise, n=n, points=points, sweeps=200
    )
    lost = sum(not exponent.low <= truth <= exponent.high for exponent in estimates)
    # Where few sweeps give an exponent at all, a tenth of them is less than chance makes.
    assert lost <= max(0.1 * len(estimates), 4)


def test_a_flat_curve_on_a_narrow_grid_gives_no_exponent():
    points = np.linspace(-math.log(2), math.log(2), 3)
    estimates = on_a_narrow_grid(
        truth=0.5, curve=bowl, depth=0.1, noise=0.15, n=3, points=points, sweeps=40
    )
    assert len(estimates) <= 2


def wall(at, curve=bowl):
    """A curve of which every run diverges from a distance on."""
    return lambda distance: np.where(distance > at, np.inf, curve(distance))


def exponents_with(curve, *, factor, follows, truth, sweeps, of_scatter=False):
    """Share of intervals that hold the exponent, perhaps of those of the scatter alone.

    Six batches a factor of 2 apart, three seeds; the grids follow the batch by the power `follows`,
    and 0 is a grid that all batches share. A sweep without an interval does not hold it.
    """
    rng = np.random.default_rng(14)
    batches = 2.0 ** np.arange(6)
    held = []
    for _ in range(sweeps):
        middle = rng.uniform(-0.5, 0.5) * math.log(factor)
        rows = []
        for log in np.log(batches):
            points = np.arange(-9, 16) * math.log(factor) + follows * log
            costs = curve(points - middle - truth * log) + rng.standard_normal((3, 1))
            optimum = optimum_of(points, costs + 0.1 * rng.standard_normal(costs.shape))
            rows.append([optimum.value, optimum.low, optimum.high, optimum.reach])
        columns = ["learning_rate", "low", "high", "grid_factor"]
        with np.errstate(over="ignore"):
            best = pd.DataFrame(np.exp(rows), columns=columns).assign(global_batch_size=batches)
        exponent = exponent_of(best.assign(grid_factor=1.0) if of_scatter else best)
        held.append(exponent.low <= truth <= exponent.high)
    return float(np.mean(held))


CURVES = {
    "x^2/2, wall from x = 0.05 on": wall(0.05),
    "x^2/2, wall from x = 0.3 on": wall(0.3),
    "x^2/2": bowl,
    "e^x - x": slope,
}
GRIDS = {"shared": 0.0, "moving": 0.5}
TRUTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)


def print_table(sweeps):
    """Print, for each curve and grid, the lowest coverage over the true exponents."""
    for name, curve in CURVES.items():
        for factor in (2, 4):
            cells = []
            for follows in GRIDS.values():
                settings = {"factor": factor, "follows": follows, "sweeps": sweeps}
                grid_too, alone = (
                    min(
                        exponents_with(curve, truth=truth, of_scatter=of_scatter, **settings)
                        for truth in TRUTHS
                    )
                    for of_scatter in (False, True)
                )
                cells.append(f"{100 * grid_too:.0f} % ({100 * alone:.0f} %)")
            print(name, factor, *cells, sep="   ", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("follows", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("truth", [0.0, 0.75])
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_walls_and_grids_that_batches_share_leave_the_truth_in(curve, truth, factor, follows):
    settings = {"factor": factor, "follows": follows, "truth": truth, "sweeps": 60}
    assert exponents_with(curve, **settings) >= 0.9


def test_optima_on_one_grid_say_less_than_their_scatter():
    settings = {"factor": 4, "follows": 0.5, "truth": 0.3, "sweeps": 20}
    assert exponents_with(wall(0.05), **settings) >= 0.9
    assert exponents_with(wall(0.05), **settings, of_scatter=True) < 0.6


if __name__ == "__main__":
    print_table(300)
