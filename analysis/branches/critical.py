"""The critical batch at an age of training, from runs that change their global batch there.

From its age on a branch trains for a window with a batch k times as large. Its rise is its mean
training loss over the samples of the last quarter of the window, less that of the run of the same
seed whose batch stays: both see the same samples. The critical batch is the largest one up to which
the mean rise, linear in log k between the factors that were tried, stays within the tolerance that
the runs state. Its interval holds all batches at which the rises, interpolated seed by seed, have a
t-interval that contains the tolerance: a test inverted, as in Fieller's interval of a ratio, and
exact for normal rises. It is open above where the largest factor lies in it. Below the smallest
factor nothing was tried: there is no estimate, and no lower end.

Source: Merrill et al. 2025, arXiv:2505.23971 (branched training).

Notes
-----
Coverage at 95 %, where a noisy quadratic tells the answer (`tests/analysis/branches`), 500 times
for each of 3, 5 and 8 seeds and three ages: 93 to 97 %.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from batchscape.analysis.branches.schedule import branches_of, tolerance_of, with_schedules
from batchscape.analysis.cells import Cells
from batchscape.analysis.estimates import FEWEST, NOT_IDENTIFIED, Estimate, t_reach
from batchscape.analysis.joins import rows_of
from batchscape.analysis.noise_scale.estimate import cell_noise_scales

_LAST = 0.25
"""Part of a window, its last, over which the loss is averaged."""
_POINTS = 1000
"""Points in a doubling of the batch among which the ends of an interval are sought."""
_DIVERGED = 1e6
"""Rise of a branch that diverged, in nats: above any tolerance."""
TRAINING = ("settings", "small_batch_size", "learning_rate", "rate_exponent")
_ENDS = ["estimate", "low", "high"]
_DEFINITION = (
    "largest global batch of which the training loss, over the last quarter of {window_samples} "
    "samples after {age_samples}, is at most {tolerance:g} nats above that of {small_batch_size} "
    "throughout"
)


def critical_batches(cells: Cells, steps: pd.DataFrame) -> pd.DataFrame:
    """Estimate the critical batch at every age at which runs change their global batch once.

    Parameters
    ----------
    steps : DataFrame
        As `load` returns them.

    Returns
    -------
    DataFrame
        One row a training and age. `TRAINING`: its settings, first batch and rate, and the exponent
        of the rate in the batch; `age_samples`, `window_samples`, `n` (seeds), `tolerance` (nats;
        missing where runs state several), `estimate`, `low`, `high` (samples), `noise_estimate`,
        `noise_low`, `noise_high` (the gradient noise scale over the window, where the batch stays),
        `rise_8` and others (nats, by batch) and `run_ids`.
    """
    runs = with_schedules(cells)
    rows = []
    for key, members in runs.groupby(["settings", runs["stages"].str[0]], sort=False):
        settings, (_, small, rate) = cast("tuple[str, tuple[int, int, float]]", key)
        n_stages = members["stages"].str.len()
        stay = members[n_stages.eq(1)].sort_values("planned_samples")
        grown = branches_of(members)
        for place, at_place in grown.groupby(["age", "planned_samples", "power"]):
            age, end, power = cast("tuple[int, int, float]", place)
            # The last quarter is whole optimizer steps of each batch, so that all see its samples.
            branches = at_place[((end - age) * _LAST % at_place["global_batch_size"]).eq(0)]
            # A run that goes on for longer is the same training up to there, unless its rate
            # depends on its end.
            longer = stay["planned_samples"].gt(end) & stay["schedule.name"].eq("constant")
            bases = stay[stay["planned_samples"].eq(end) | longer].drop_duplicates("block")
            compared = pd.concat([bases, branches])
            within = steps[steps["samples"].between(age + 1, end)]
            last = within[within["samples"].gt(end - (end - age) * _LAST)]
            losses = _last_losses(compared, last)
            rises = losses.sub(losses.get(small, math.nan), axis=0).dropna().clip(upper=_DIVERGED)
            if rises.empty:
                continue
            tolerance = tolerance_of(compared, "final_loss")
            ends = critical_batch(rises.to_numpy(), rises.columns.to_numpy(), tolerance)
            noise = cell_noise_scales(replace(cells, runs=bases.assign(cell=0)), within)
            noise = noise.reindex([0])[_ENDS].astype(float)
            # Without an upper end it is not identified.
            noise["estimate"] = noise["estimate"].where(noise["high"].lt(math.inf))
            rows.append(
                {
                    **dict(zip(TRAINING, (settings, small, rate, power), strict=True)),
                    "age_samples": age,
                    "window_samples": end - age,
                    "n": len(rises),
                    "tolerance": tolerance,
                    **dict(zip(_ENDS, ends, strict=True)),
                    **noise.add_prefix("noise_").iloc[0],
                    **rises.where(rises < _DIVERGED, math.inf).mean().add_prefix("rise_").iloc[1:],
                    "run_ids": " ".join(sorted(compared["run_id"])),
                }
            )
    return pd.DataFrame(rows)


def critical_batch(
    rises: NDArray[np.float64], batches: ArrayLike, tolerance: float
) -> tuple[float, float, float]:
    """Return the critical batch with the ends of its 95 % interval.

    Parameters
    ----------
    rises : array, shape (n, m)
        Loss of each seed at each batch, less that at the first one: nats.
    batches : array_like, shape (m,)
        Ascending.
    tolerance : float
        Mean rise that is accepted, in nats.

    Returns
    -------
    tuple of float
        In samples. The value is NaN where the mean rise crosses the tolerance at none of the tried
        batches; an end is 0 or infinite where there is none, NaN for fewer than `FEWEST` seeds.
    """
    knots = np.log2(batches)
    steps = int(_POINTS * (knots[-1] - knots[1]))
    x = np.union1d(knots[1:], np.linspace(knots[1], knots[-1], steps))
    at = np.array([np.interp(x, knots, row) for row in rises])
    mean, n = at.mean(axis=0), len(rises)
    is_above = mean > tolerance
    value = 2 ** x[is_above.argmax()] if is_above.any() and not is_above[0] else math.nan
    if n < FEWEST:
        return value, math.nan, math.nan
    half = t_reach(at.std(axis=0, ddof=1) / math.sqrt(n), np.full(len(x), n - 1.0))
    is_small, is_large = mean + half < tolerance, mean - half > tolerance
    is_between = ~is_small & ~is_large
    first, last = (x[is_between] if is_between.any() else x[::-1])[[0, -1]]
    low = float(2**first) if is_small[0] else 0.0
    high = float(2**last) if is_large[-1] else math.inf
    return float(value), low, high


def estimate_of(row: Mapping[Hashable, Any]) -> Estimate:
    """Return the critical batch of one row as an estimate."""
    value, low, high = (float(row[name]) for name in _ENDS)
    definition, method = _DEFINITION.format_map(row), f"inverted t-test over {row['n']} seeds"
    note = NOT_IDENTIFIED if math.isnan(value) else None
    return Estimate(value, low, high, row["n"], "samples", method, definition, note)


def _last_losses(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the mean loss of each run in some steps: rows are blocks, columns batches."""
    rows = rows_of(runs, steps, ["loss"])
    # All steps of a run have one batch here.
    means = rows.groupby("run")["loss"].mean().reindex(range(len(runs))).to_numpy()
    losses = np.where(runs["status"].eq("diverged"), math.inf, means)
    run_losses = runs.assign(loss=losses).drop_duplicates(["block", "global_batch_size"])
    return run_losses.pivot(index="block", columns="global_batch_size", values="loss")
