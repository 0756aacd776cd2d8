"""Gradient noise scale of runs and cells, with intervals, and how it changes over a training.

The estimate is a ratio of two means (`record/noise_scale.py`), and its interval is Fieller's: all
ratios r at which the mean of noise - r * signal is compatible with zero. Where the signal |G|^2
itself is compatible with zero the interval has no upper end; the scale is then "not identified",
though its lower end still says how large it is at least.

* Within a run the units are sampled steps. Given the weights their errors are independent, for no
  two steps share samples, but their means drift. Variances hence come from differences of
  successive steps, with the degrees of freedom of such an estimate, 2 (n-1)^2 / (3n-4) (von Neumann
  et al. 1941, Annals of Mathematical Statistics 12, p. 153). The interval is for the mean over this
  very trajectory.
* Over the training, both parts are exponential moving averages of the same half-life in samples,
  each divided by the sum of its weights, so that the start does not pull them to zero; only then
  are they divided (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1). With weights w the
  squared difference of two successive steps counts (w_i^2 + w_(i-1)^2) / 2 = c_i, which leaves
  2 (sum c_i)^2 / (2 sum c_i^2 + sum c_i c_(i+1)) degrees of freedom: the figure above where all
  weights are equal.
* In a cell of several runs the units are runs, with equal weights and n-1 degrees of freedom. The
  interval is for the population of seeds. With two or three runs it is wide. A few runs of a skewed
  population have a spread that is too small where their mean is: the interval is widened to that of
  the logarithm, the t-interval of log ratios laid around the log of the ratio of means.

Source: Fieller 1954, Journal of the Royal Statistical Society B 16, p. 175.

Notes
-----
Chosen by simulating coverage at 95 %: 600 runs in each of 9 cases (noise scales of 10 to 1000
samples against batches of 16 and 64, small batches of 1, 4 and 32, eigenvalues as 1/i and 1/i^2,
signals that are steady, fall by e^3 and e^6, or fluctuate), lowest to highest case:

=========================== ============ ============ ============
sampled steps               5            10 and 20    50 and 200
=========================== ============ ============ ============
Fieller, as here            92 to 96 %   92 to 96 %   93 to 96 %
delta method on logarithms  87 to 97 %   82 to 97 %   87 to 98 %
bootstrap of steps          78 to 83 %   85 to 94 %   92 to 96 %
bootstrap of blocks, n^1/3  69 to 74 %   77 to 91 %   90 to 98 %
=========================== ============ ============ ============

Infinite ends count as they are. With the sample variance instead of successive differences
intervals under drift are 4 to 50 % wider at 50 and 200 steps. For cells of 2 to 10 runs whose true
scales differ by 0, 10 and 30 % (2000 cells each): Fieller over runs 94 to 98 %, over the steps of
all runs 55 to 96 %. Of runs whose noise is lognormal with a standard deviation of 1 in the
logarithm (4000 cells each of 2, 3, 4, 5, 6, 8 and 10 runs): Fieller alone 82 to 93 %, as here 91 to
96 %; with 0.5, or 0.7 in signal and noise, or Student's t of 3 degrees, as here 94 to 99 %.
`tests/analysis/noise_scale/test_estimate.py` repeats a part of this.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from batchscape.analysis.cells import Cells
from batchscape.analysis.comparing.pairs import Contrast, logarithm
from batchscape.analysis.estimates import FEWEST, NOT_IDENTIFIED, TWO_SIDED, half_width
from batchscape.analysis.joins import column_of, rows_of
from batchscape.record.noise_scale import NOISE_COLUMNS, noise_samples, objective_depends_on_batch

_STEPS_A_HALF_LIFE = 10
"""Sampled steps of each run in a half-life of a curve, at least."""

_MOST_POINTS = 20

_FARTHEST = 700.0
"""Logarithm beyond which an end is infinite: its exponential has no floating-point number."""
_PARTS = ["noise", "signal"]


class _Sampled(NamedTuple):
    """Sampled steps of one or more runs; those of a run lie together, in order of time."""

    run: NDArray[np.int64]
    samples: NDArray[np.float64]
    """Samples until this step."""
    tokens: NDArray[np.float64]
    """Tokens until this step; NaN where samples have none."""
    parts: NDArray[np.float64]
    """Shape (n, 2): numerator and denominator."""
    b_small: NDArray[np.int64]
    b_big: NDArray[np.int64]

    def where(self, chosen: NDArray[np.bool_]) -> _Sampled:
        """Keep some of the steps."""
        return _Sampled._make(column[chosen] for column in self)

    def starts(self) -> NDArray[np.intp]:
        """Return the first row of each run."""
        return np.flatnonzero(np.diff(self.run, prepend=-1))


def _sampled_by(samples: pd.DataFrame, key: str) -> dict[int, _Sampled]:
    """Split a table of sampled steps by a key; thousands of small tables would take far longer."""
    names = [key, "run", "b_small", "b_big"]
    integers = {name: samples[name].to_numpy(dtype=np.int64) for name in names}
    order = np.lexsort((integers["run"], integers[key]))
    integers = {name: column[order] for name, column in integers.items()}
    groups = integers[key]
    progress = [
        samples[name].to_numpy(dtype=np.float64, na_value=np.nan)[order]
        for name in ("samples", "tokens")
    ]
    parts = np.asfortranarray(samples[_PARTS].to_numpy(dtype=np.float64)[order])
    columns = integers["run"], *progress, parts, integers["b_small"], integers["b_big"]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    ends = np.append(starts, len(groups))[1:]
    return {
        int(groups[begin]): _Sampled(*(column[begin:end] for column in columns))
        for begin, end in zip(starts, ends, strict=True)
    }


def run_noise_scales(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Estimate the gradient noise scale of every run in which it was sampled.

    Parameters
    ----------
    runs, steps : DataFrame
        As `load` returns them.

    Returns
    -------
    DataFrame
        One row a run: `sweep_dir`, `run_id` and the columns of `cell_noise_scales`.
    """
    table = _scales(_samples(runs, steps), "run")
    keys = runs[["sweep_dir", "run_id"]].iloc[table.index.to_numpy(dtype=np.int64)]
    return pd.concat([keys.reset_index(drop=True), table.reset_index(drop=True)], axis=1)


def cell_noise_scales(cells: Cells, steps: pd.DataFrame) -> pd.DataFrame:
    """Estimate the gradient noise scale of every cell, from its completed runs.

    Parameters
    ----------
    steps : DataFrame
        As `load` returns them.

    Returns
    -------
    DataFrame
        One row a cell, indexed by `cell`: `estimate` (samples; missing where one of the two means
        is not above zero), `low`, `high` (infinite: no upper end), `n` (units), `n_runs`, `method`
        (which says what the units are), `b_small` and `b_big` (samples behind the two gradients;
        over stages, the smallest and the largest), `tokens_per_sample`, `estimate_tokens`,
        `low_tokens`, `high_tokens`, and `note`.
    """
    return _scales(_cell_samples(cells, steps), "cell").rename_axis("cell")


def noise_scale_curves(cells: Cells, steps: pd.DataFrame) -> pd.DataFrame:
    """Follow the gradient noise scale over the training, by debiased exponential moving averages.

    A curve has at most 20 points at equal distances in samples. The half-life is that distance, and
    10 sampled steps of each run or more. An average lags by 1.4 half-lives.

    Parameters
    ----------
    cells, steps
        As for `cell_noise_scales`.

    Returns
    -------
    DataFrame
        One row for each cell and point that all of its runs reached: `cell`, `samples` and `tokens`
        (seen), `half_life_samples`, and the columns of `cell_noise_scales`, where `n` and `n_runs`
        count all sampled steps or runs so far.
    """
    samples = _cell_samples(cells, steps)
    curves = []
    for cell, cell_samples in _sampled_by(samples, "cell").items():
        starts = cell_samples.starts()
        points = min(
            max(len(cell_samples.run) // len(starts) // _STEPS_A_HALF_LIFE, 1), _MOST_POINTS
        )
        lasts = np.maximum.reduceat(cell_samples.samples, starts)
        half_life = lasts.max() / points
        # Curves end with the shortest run: later means would jump to those of the other runs.
        for point in half_life * np.arange(1, int(points * lasts.min() / lasts.max()) + 1):
            until_point = cell_samples.where(cell_samples.samples <= point)
            row = _cell_row(until_point, 0.5 ** ((point - until_point.samples) / half_life))
            tokens = point * row["tokens_per_sample"]
            place = {"samples": point, "tokens": tokens, "half_life_samples": half_life}
            curves.append({"cell": cell, **place, **row})
    places = dict.fromkeys(("samples", "tokens", "half_life_samples"), "float64")
    kinds = {"cell": "int64", **places, **_COLUMNS}
    return pd.DataFrame(curves, columns=list(kinds)).astype(kinds)


def step_to_step_variance(steps: pd.DataFrame) -> pd.Series[float]:
    """Estimate the variance of the gradient norm from step to step, without its steady drift.

    Second differences of independent values have 6 times their variance, and a drift has none. The
    1/B of the noise scale is not put in, as tr(S)/B does.

    Parameters
    ----------
    steps : DataFrame
        One row an optimizer step, in order of time: `run` and `gradient_norm`.

    Returns
    -------
    Series
        By run; NaN for fewer than three steps.
    """
    bends = steps.groupby("run")["gradient_norm"].diff().groupby(steps["run"]).diff()
    variance: pd.Series[float] = (bends**2 / 6).groupby(steps["run"]).mean()
    return variance


def variance_exponents(runs: pd.DataFrame, steps: pd.DataFrame, seed: str) -> Contrast | None:
    """Estimate how the step-to-step variance of the gradient norm grows with the global batch.

    Parameters
    ----------
    runs : DataFrame
        `run_id`, `global_batch_size` and the column that tells seeds apart; several are averaged.
    steps : DataFrame
        As for `step_to_step_variance`, where `run` is the index of `runs`.
    seed : str
        That column.

    Returns
    -------
    Contrast or None
        The exponent of each seed that has all batches with `FEWEST` seeds, or with as many as
        there are; None without two batches.
    """
    table = runs.join(logarithm(step_to_step_variance(steps)).rename("log")).dropna(subset=["log"])
    wide = table.groupby([seed, "global_batch_size"])["log"].mean().unstack("global_batch_size")
    seeds = wide.notna().sum().nlargest(2)
    if len(seeds) < 2:
        return None
    wide = wide.dropna(axis=1, thresh=min(FEWEST, int(seeds.min()))).dropna()
    x = np.log(wide.columns.to_numpy(dtype=float))
    x = x - x.mean()
    slopes = wide.to_numpy(dtype=float) @ x / (x @ x)
    run_ids = table.loc[table[seed].isin(wide.index), "run_id"]
    name = f"global batches {', '.join(map(str, wide))}"
    return Contrast(name, slopes, tuple(sorted(set(run_ids))))


def fieller_interval(
    mean: NDArray[np.float64], covariance: NDArray[np.float64], degrees: float
) -> tuple[float, float]:
    """Return the interval of a ratio that is not negative, from the means of its two parts.

    Parameters
    ----------
    mean : array, shape (2,)
        Of numerator and denominator.
    covariance : array, shape (2, 2)
        Of these means.
    degrees : float
        Degrees of freedom of the covariance.

    Returns
    -------
    tuple of float
        All r >= 0 with (u - r v)^2 <= t^2 Var(u - r v), as its lower and upper end; the latter is
        infinite where v is compatible with zero. NaN where no such r exists.
    """
    t = float(stdtrit(degrees, TWO_SIDED))
    (c, b), (_, a) = np.outer(mean, mean) - t * t * covariance
    root = math.sqrt(max(b * b - a * c, 0.0))
    # The set is a r^2 - 2 b r + c <= 0, with a > 0 where v differs from zero, c > 0 where u does.
    if a > 0 and b < 0 < c:
        return math.nan, math.nan
    # Written with c so that the lower end stays exact where a vanishes.
    low = c / (b + root) if c > 0 and b + root > 0 else 0.0
    return low, (b + root) / a if a > 0 else math.inf


def _samples(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the parts of the ratio for every sampled step of some runs, with its `run`."""
    sampled = steps[steps["small_batch_size"].notna()]
    rows = rows_of(runs, sampled, ["samples", "tokens", *NOISE_COLUMNS])
    samples = noise_samples(rows)
    return samples.join(rows[["run", "samples", "tokens"]])


def _cell_samples(cells: Cells, steps: pd.DataFrame) -> pd.DataFrame:
    is_dependent = column_of(cells.runs, "not_invariant").map(objective_depends_on_batch)
    completed = cells.runs[cells.runs["status"].eq("completed") & ~is_dependent.astype(bool)]
    # A timing repeat of a trajectory adds no draw of its noise.
    runs = completed.drop_duplicates(["cell", "trajectory_id"])
    samples = _samples(runs, steps)
    sampled_runs = runs.assign(task=column_of(runs, "task")).iloc[samples["run"].to_numpy()]
    # Samples of other tasks have targets, but no tokens.
    tokens = samples["tokens"].where(sampled_runs["task"].eq("next_token").to_numpy())
    return samples.assign(tokens=tokens, cell=sampled_runs["cell"].to_numpy())


def _scales(samples: pd.DataFrame, key: str) -> pd.DataFrame:
    """Estimate the noise scale over all sampled steps, by a key."""
    rows = {
        number: _cell_row(sampled, np.ones(len(sampled.run)))
        for number, sampled in _sampled_by(samples, key).items()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(_COLUMNS)).astype(_COLUMNS)


def _cell_row(sampled: _Sampled, weights: NDArray[np.float64]) -> dict[str, Any]:
    """Return the columns of a table for the weighed steps of a run, or for runs of equal weight."""
    values, starts = sampled.parts, sampled.starts()
    several = len(starts) > 1
    if several:
        sums = np.add.reduceat(values * weights[:, None], starts)
        values = sums / np.add.reduceat(weights, starts)[:, None]
    unit_weights = None if several else weights
    noise, signal = np.average(values, axis=0, weights=unit_weights)
    ratio = noise / signal if noise > 0 and signal > 0 else math.nan
    low, high = _interval(values, unit_weights)
    tokens_seen = sampled.tokens[~np.isnan(sampled.tokens)]
    tokens = tokens_seen.sum() / sampled.samples.sum() if len(tokens_seen) else math.nan
    ends = {"estimate": ratio, "low": low, "high": high}
    return {
        **ends,
        "n": len(values),
        "n_runs": len(starts),
        "method": f"Fieller over {'runs' if several else 'steps'}",
        "b_small": sampled.b_small.min(),
        "b_big": sampled.b_big.max(),
        "tokens_per_sample": tokens,
        **{f"{name}_tokens": value * tokens for name, value in ends.items()},
        "note": None if math.isfinite(high) else NOT_IDENTIFIED,
    }


def _interval(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None
) -> tuple[float, float]:
    """Return Fieller's interval over weighed steps in order of time, or over runs."""
    if len(values) == 1:
        return math.nan, math.nan
    mean = np.average(values, axis=0, weights=weights)
    if weights is None:
        return _over_runs(mean, values)
    squares = (weights / weights.sum()) ** 2
    counts = (squares[1:] + squares[:-1]) / 2
    changes = np.diff(values, axis=0)
    covariance = (changes * counts[:, None]).T @ changes / 2 * squares.sum() / counts.sum()
    neighbours = counts[1:] @ counts[:-1]
    degrees = 2 * counts.sum() ** 2 / (2 * counts @ counts + neighbours)
    return fieller_interval(mean, covariance, float(degrees))


def _over_runs(mean: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float]:
    """Return Fieller's interval over runs, widened to that of the logarithm where runs have one."""
    n = len(values)
    low, high = fieller_interval(mean, np.cov(values.T) / n, n - 1)
    if not (values > 0).all():
        return low, high
    logs = np.log(values[:, 0] / values[:, 1])
    half = half_width(logs)
    centre = math.log(mean[0] / mean[1])
    end = centre + half
    top = math.exp(end) if end < _FARTHEST else math.inf
    return min(low, math.exp(centre - half)), max(high, top)


_COLUMNS = {
    "estimate": "float64",
    "low": "float64",
    "high": "float64",
    "n": "int64",
    "n_runs": "int64",
    "method": "object",
    "b_small": "int64",
    "b_big": "int64",
    "tokens_per_sample": "float64",
    "estimate_tokens": "float64",
    "low_tokens": "float64",
    "high_tokens": "float64",
    "note": "object",
}
"""Columns of every noise scale, with their types."""
