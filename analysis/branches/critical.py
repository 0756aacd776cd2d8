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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.branches.schedule import Schedule, with_schedules
from batchscape.analysis.cells import Cells
from batchscape.analysis.equivalence.paired import stated_margin
from batchscape.analysis.estimates import FEWEST, NOT_IDENTIFIED, Estimate, t_reach
from batchscape.analysis.joins import rows_of
from batchscape.analysis.noise_scale.estimate import cell_noise_scales

_LAST = 0.25
"""Part of a window, its last, over which the loss is averaged."""
_POINTS = 1000
"""Points in a doubling of the batch among which the ends of an interval are sought."""
_DIVERGED = 1e6
"""Rise of a branch that diverged, in nats: above any tolerance."""
DEFINITION = (
    "largest global batch of which the training loss, over the last quarter of {window_samples} "
    "samples after {age_samples}, is at most {tolerance:g} nats above that of {small_batch_size} "
    "throughout"
)
TOLERANCE = "measure.equivalence_margin"


def critical_batches(cells: Cells, steps: pd.DataFrame) -> pd.DataFrame:
    """Estimate the critical batch at every age at which runs change their global batch once.

    Parameters
    ----------
    steps : DataFrame
        As `load` returns them.

    Returns
    -------
    DataFrame
        One row a training, age and rule for the rate: `training` (as `with_schedules` has it),
        `age_samples`, `window_samples`, `small_batch_size`, `rate_exponent` (in the batch), `n`
        (seeds), `tolerance` (nats), `estimate`, `low`, `high` (samples), `note` (why there is no
        estimate), `noise`, `noise_low`, `noise_high` (samples: the gradient noise scale over the
        window, where the batch stays), `rise_8` and others (nats, by batch) and `run_ids`.
    """
    rows = []
    for training, members in with_schedules(cells).groupby("training", sort=False):
        small = training[-1]
        n_stages = members["schedule"].map(lambda schedule: len(schedule.batches))
        stay = members[n_stages.eq(1)].sort_values("planned_samples")
        grown = members[n_stages.eq(2) & members["global_batch_size"].gt(small)]
        ages = grown["schedule"].map(lambda schedule: schedule.begins[1])
        powers = grown["schedule"].map(rate_exponent)
        for (age, end, power), branches in grown.groupby([ages, "planned_samples", powers]):
            # A run that goes on for longer is the same training up to there, unless its rate
            # depends on its end.
            longer = stay["planned_samples"].gt(end) & stay["schedule.name"].eq("constant")
            bases = stay[stay["planned_samples"].eq(end) | longer].drop_duplicates("block")
            if bases.empty:
                continue
            compared = pd.concat([bases, branches])
            within = steps[steps["samples"].between(age + 1, end)]
            losses = _last_losses(compared, within, end, (end - age) * _LAST)
            rises = losses.sub(losses[small], axis=0).dropna()
            if rises.empty:
                continue
            margins = pd.to_numeric(compared.reindex(columns=[TOLERANCE])[TOLERANCE])
            tolerance, conflict = stated_margin(margins.to_numpy(dtype=float), "final_loss")
            values = rises.clip(upper=_DIVERGED).to_numpy()
            estimate, low, high = critical_batch(values, rises.columns, tolerance)
            noise = cell_noise_scales(replace(cells, runs=bases.assign(cell=0)), within)
            rows.append(
                {
                    "training": training,
                    "age_samples": age,
                    "window_samples": end - age,
                    "small_batch_size": small,
                    "rate_exponent": power,
                    "n": len(rises),
                    "tolerance": tolerance,
                    "estimate": estimate,
                    "low": low,
                    "high": high,
                    "note": conflict or _note(values.mean(axis=0), rises.columns, tolerance),
                    **_noise(noise),
                    **rises.mean().add_prefix("rise_").iloc[1:],
                    "run_ids": " ".join(sorted(compared["run_id"])),
                }
            )
    return pd.DataFrame(rows)


def critical_batch(
    rises: NDArray[np.float64], batches: Sequence[int], tolerance: float
) -> tuple[float, float, float]:
    """Return the critical batch with the ends of its 95 % interval.

    Parameters
    ----------
    rises : array, shape (n, m)
        Loss of each seed at each batch, less that at the first one: nats.
    batches : sequence of int, length m
        Ascending.
    tolerance : float
        Mean rise that is accepted, in nats.

    Returns
    -------
    tuple of float
        In samples. The value is NaN where the mean rise crosses the tolerance at none of the tried
        batches; an end is 0 or infinite where there is none, NaN for fewer than `FEWEST` seeds.
    """
    known = np.log2(batches)
    steps = int(_POINTS * (known[-1] - known[1]))
    x = np.union1d(known[1:], np.linspace(known[1], known[-1], steps))
    at = np.array([np.interp(x, known, row) for row in rises])
    mean, n = at.mean(axis=0), len(rises)
    is_above = mean > tolerance
    value = 2 ** x[is_above.argmax()] if is_above.any() and not is_above[0] else math.nan
    if n < FEWEST:
        return value, math.nan, math.nan
    half = t_reach(at.std(axis=0, ddof=1) / math.sqrt(n), np.full(len(x), n - 1.0))
    is_small, is_large = mean + half < tolerance, mean - half > tolerance
    in_between = np.flatnonzero(~is_small & ~is_large)
    low = 2 ** x[in_between[0] if len(in_between) else -1] if is_small[0] else 0.0
    high = 2 ** x[in_between[-1] if len(in_between) else 0] if is_large[-1] else math.inf
    return float(value), float(low), float(high)


def estimate_of(row: Mapping[Hashable, Any]) -> Estimate:
    """Return the critical batch of one row as an estimate."""
    value, low, high = (float(row[name]) for name in ("estimate", "low", "high"))
    method = f"inverted t-test over {row['n']} seeds"
    definition = DEFINITION.format(**row)
    note = None if pd.isna(row["note"]) else str(row["note"])
    return Estimate(value, low, high, int(row["n"]), "samples", method, definition, note)


def rate_exponent(schedule: Schedule) -> float:
    """Return the exponent in the batch by which the learning rate grows until the last stage."""
    rate, batch = schedule.rates[-1] / schedule.rates[0], schedule.batches[-1] / schedule.batches[0]
    return round(math.log(rate) / math.log(batch), 2)


def _note(mean: NDArray[np.float64], batches: Sequence[int], tolerance: float) -> str | None:
    """Say why there is no estimate."""
    if mean[1] > tolerance:
        return f"{NOT_IDENTIFIED}: {batches[1]} is too large already, and nothing between was tried"
    return None if mean.max() > tolerance else f"{NOT_IDENTIFIED}: no tried batch is too large"


def _last_losses(runs: pd.DataFrame, steps: pd.DataFrame, end: int, length: float) -> pd.DataFrame:
    """Return the mean loss over the last samples until `end`: rows are blocks, columns batches."""
    rows = rows_of(runs, steps, ["samples", "global_batch_size", "loss"])
    # A step that began earlier counts with its last samples.
    weights = rows[["global_batch_size"]].assign(left=rows["samples"] - end + length).min(axis=1)
    rows = rows.assign(weight=weights.clip(lower=0))
    sums = rows.assign(loss=rows["loss"] * rows["weight"]).groupby("run")[["loss", "weight"]].sum()
    losses = (sums["loss"] / sums["weight"]).reindex(range(len(runs))).set_axis(runs.index)
    losses = losses.mask(runs["status"].eq("diverged"), math.inf)
    named = runs.assign(loss=losses)
    return named.pivot(index="block", columns="global_batch_size", values="loss")


def _noise(table: pd.DataFrame) -> dict[str, float]:
    """Return the noise scale of one cell; without an upper end it is not identified."""
    columns = table.reindex(columns=["estimate", "low", "high"]).astype(float)
    value, low, high = columns.iloc[0] if len(columns) else (math.nan,) * 3
    value = math.nan if math.isinf(high) else value
    return {"noise": value, "noise_low": low, "noise_high": high}
