"""The smallest detectable effect, by quadrature, against a published table and by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from batchscape.analysis.cells import find_cells
from batchscape.analysis.comparing.power import detectable_effects, smallest_detectable_effect
from batchscape.errors import AnalysisError
from batchscape.record.tables import load


def power_of(noncentrality: float, degrees: int, alpha: float) -> float:
    """The chance that |t| exceeds its critical value, over all values of its numerator.

    Given the numerator z, normal around the noncentrality, t is beyond where the scale is small
    enough: a chi-square. (The code integrates the other way round. Library functions of the
    noncentral t are no oracle: far in the tail they have no value, or another on each processor.)
    """
    critical = stats.t.ppf(1 - alpha / 2, degrees)

    def density(z: float) -> float:
        within = stats.chi2.cdf(degrees * (z / critical) ** 2, degrees)
        return float(stats.norm.pdf(z - noncentrality) * within)

    low, high = noncentrality - 9, noncentrality + 9
    edges = [low, 0.0, noncentrality, high] if low < 0 else [low, noncentrality, high]
    found = sum(integrate.quad(density, *ends, epsabs=1e-11)[0] for ends in pairwise(edges))
    return float(found)


@pytest.mark.parametrize(
    ("n", "alpha"), [(2, 0.05), *((n, alpha) for n in (3, 10, 40) for alpha in (0.05, 0.01))]
)
@pytest.mark.parametrize("power", [0.5, 0.8, 0.95])
def test_it_has_the_power_that_was_asked_for(n: int, power: float, alpha: float) -> None:
    one = smallest_detectable_effect(1.0, n, power=power, alpha=alpha) * math.sqrt(n)
    assert power_of(one, n - 1, alpha) == pytest.approx(power, abs=1e-6)
    two = smallest_detectable_effect(1.0, n, paired=False, power=power, alpha=alpha)
    assert power_of(two * math.sqrt(n / 2), 2 * n - 2, alpha) == pytest.approx(power, abs=1e-6)


@pytest.mark.parametrize(
    ("alpha", "sizes"),
    [(0.01, (586, 95, 38)), (0.05, (393, 64, 26)), (0.10, (310, 50, 20))],
)
def test_group_sizes_are_those_of_cohens_table(alpha: float, sizes: tuple[int, int, int]) -> None:
    """Runs in each of two groups for a small, medium and large effect, power 0.80.

    Source: Cohen 1992, A Power Primer, Psychological Bulletin 112, table 2, first row. Its numbers
    are rounded from those of his tables of 1988; one more or less is that rounding.
    """
    for effect, n in zip((0.2, 0.5, 0.8), sizes, strict=True):
        more, fewer = (
            smallest_detectable_effect(1.0, size, paired=False, alpha=alpha)
            for size in (n + 1, n - 1)
        )
        assert more < effect < fewer


@given(st.floats(1e-6, 1e6), st.integers(2, 30), st.booleans())
def test_it_scales_with_the_spread_and_falls_with_n(sd: float, n: int, paired: bool) -> None:
    one = smallest_detectable_effect(1.0, n, paired=paired)
    assert smallest_detectable_effect(sd, n, paired=paired) == pytest.approx(sd * one)
    assert smallest_detectable_effect(1.0, n + 1, paired=paired) < one


def test_four_in_five_simulated_sweeps_find_it() -> None:
    rng = np.random.default_rng(3)
    effect = smallest_detectable_effect(0.7, 5)
    values = rng.normal(effect, 0.7, (20_000, 5))
    found = stats.ttest_1samp(values, 0, axis=1).pvalue < 0.05
    assert np.mean(found) == pytest.approx(0.8, abs=0.01)


def test_what_cannot_be_said() -> None:
    assert math.isnan(smallest_detectable_effect(1.0, 1))
    assert math.isnan(smallest_detectable_effect(math.nan, 5))
    assert smallest_detectable_effect(0.0, 5) == 0
    with pytest.raises(AnalysisError, match="spread"):
        smallest_detectable_effect(-1.0, 5)
    with pytest.raises(AnalysisError, match="power=1"):
        smallest_detectable_effect(1.0, 5, power=1)


@pytest.mark.slow
def test_the_spread_of_a_difference_leaves_cells_and_seeds_out(build: Callable[..., Any]) -> None:
    sweep = build()
    for seed in range(4):
        for batch in (8, 32, 64):
            sweep.run((1, batch, 1), seed=seed)
        # Another cut of the same trajectory is no further cell of a loss.
        sweep.run((1, 8, 4), seed=seed)
    cells = find_cells(load(sweep.path).runs)
    table = detectable_effects(cells).set_index("quantity")
    runs = cells.runs.drop_duplicates("trajectory_id")
    wide = runs.pivot(index="seed", columns="global_batch_size", values="final_eval_loss")
    # The mean variance of the differences of two columns, over all pairs of columns.
    columns = wide.to_numpy(dtype=float).T
    variances = [np.var(a - b, ddof=1) for n, a in enumerate(columns) for b in columns[:n]]
    row: dict[Any, Any] = table.loc["final_eval_loss"].to_dict()
    assert (row["n"], row["cells"], row["paired"], row["unit"]) == (4, 3, True, "nats")
    assert row["spread"] == pytest.approx(np.sqrt(np.mean(variances)))
    assert row["detectable"] == pytest.approx(smallest_detectable_effect(row["spread"], 4))
    assert table.loc["step_time_s", "cells"] == 4
    assert table.loc["step_time_s", "unit"] == "%"


def test_one_trajectory_a_seed_is_unpaired_and_one_seed_is_nothing(
    build: Callable[..., Any],
) -> None:
    runs = load(build().fork().path).runs
    table = detectable_effects(find_cells(runs)).set_index("quantity")
    assert not table.loc["final_eval_loss", "paired"]
    first = runs.drop_duplicates("trajectory_id")["final_eval_loss"].dropna().astype(float)
    assert table.loc["final_eval_loss", "spread"] == pytest.approx(first.std())
    assert detectable_effects(find_cells(runs[runs["seed"].eq(0)])).empty


def test_cuts_of_a_program_are_cells_of_their_own(build: Callable[..., Any]) -> None:
    runs = load(build().fork().path).runs
    alike = detectable_effects(find_cells(runs)).set_index("quantity")
    apart = detectable_effects(find_cells(runs.assign(**{"engine.name": "command"})))
    apart = apart.set_index("quantity")
    assert alike.loc["final_eval_loss", "cells"] == 1
    assert apart.loc["final_eval_loss", "cells"] == 4
    assert apart.loc["final_eval_loss", "paired"]


def test_the_runs_behind_an_effect_are_those_of_whole_blocks(build: Any) -> None:
    """A seed that one of the trainings lacks is in no spread, and its run in no list."""
    sweep = build()
    for seed in (0, 1, 2):
        sweep.run((1, 8, 4), seed=seed)
    for seed in (0, 1):
        sweep.run((1, 8, 8), seed=seed)
    cells = find_cells(load(sweep.path).runs)
    (row,) = detectable_effects(cells).query("quantity == 'final_eval_loss'").to_dict("records")
    assert (row["n"], row["cells"], row["paired"]) == (2, 2, True)
    used = cells.runs[cells.runs["seed"].lt(2)]
    assert sorted(row["run_ids"].split(";")) == sorted(used["run_id"])
    assert row["sweep_dirs"] == cells.runs["sweep_dir"].iloc[0]
