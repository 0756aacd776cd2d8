"""Log steps to a target by batch size and seed, which a trade-off is fitted to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr

from batchscape.analysis.estimates import Estimate, half_width
from batchscape.analysis.joins import column_of
from batchscape.analysis.numbers import significant
from batchscape.analysis.targets.schema import check
from batchscape.analysis.targets.tidy import distinct_trajectories
from batchscape.errors import AnalysisError

_NEEDED = ("global_batch_size", "seed", "steps_to_target")
_PENALTY_LEVEL = 0.01
_LEAST_PENALTY = 0.05


@dataclass(frozen=True)
class Measurements:
    """Steps to one target by batch size and seed, and the batch sizes left out of a fit."""

    batches: NDArray[np.float64]
    """Batch sizes in samples, ascending, shape (batches,)."""
    log_steps: NDArray[np.float64]
    """Shape (batches, seeds); NaN where a seed was not run."""
    runs: pd.DataFrame
    """Rows of runs behind it."""
    log_first_steps: NDArray[np.float64]
    """As `log_steps`, to the first crossing; the same where it is not known."""
    excluded: pd.DataFrame
    """One row a batch size that is left out: `global_batch_size`, `runs`, `reached`, `reason`."""
    warnings: tuple[str, ...]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Runs of each batch size."""
        return np.asarray((~np.isnan(self.log_steps)).sum(axis=1), dtype=np.int64)

    @property
    def n_seeds(self) -> int:
        """Seeds of the typical batch size."""
        return int(np.median(self.counts)) if len(self.counts) else 0


def measure(reaches: pd.DataFrame) -> Measurements:
    """Check a table and arrange what of it can be fitted.

    A batch size with a run that did not reach the target is left out whole: its mean is unknown,
    and the mean over the runs that did reach would be too small.

    Parameters
    ----------
    reaches : DataFrame
        One row a run of one group and target: `global_batch_size` (samples), `seed`,
        `steps_to_target` (missing or infinite: not reached), and optionally `outcome`,
        `trajectory_id`, `status`, `learning_rate`, `group`, `target_loss`.

    Raises
    ------
    AnalysisError
        As `check` does, or if runs are repeated, or several groups, targets or learning rates are
        mixed.
    """
    reaches = check(reaches, "a trade-off", _NEEDED, ("outcome",))
    # Cuts and timing repeats of one trajectory draw no new noise, nor do cuts of a program.
    rows = _checked(distinct_trajectories(reaches.drop(columns="program_cut", errors="ignore")))
    by_batch = rows.groupby("global_batch_size")["reached"]
    excluded = by_batch.agg(runs="size", reached="sum").assign(reason="")
    for size in excluded.index[excluded["reached"] < excluded["runs"]]:
        missed = rows[rows["global_batch_size"].eq(size) & ~rows["reached"]]
        outcomes = column_of(missed, "outcome").value_counts()
        kinds = ", ".join(f"{count} {name}" for name, count in outcomes.items())
        excluded.loc[size, "reason"] = (
            f"{len(missed)} of {excluded['runs'][size]} runs did not reach the target"
            + f" ({kinds})" * bool(kinds)
        )
    warnings = [
        f"Batch size {size:g} is left out of the fit: {reason}."
        for size, reason in excluded["reason"].items()
        if reason
    ]
    steps = _by_seed(rows[rows["global_batch_size"].map(excluded["reason"]).eq("")])
    penalty = _penalty(steps.mul(steps.index, axis=0).apply(np.log))
    if penalty is not None:
        first_fitted, text = penalty
        warnings.append(text)
        excluded.loc[steps.index[steps.index < first_fitted], "reason"] = "small-batch penalty"
    runs = rows[rows["global_batch_size"].map(excluded["reason"]).eq("")]
    runs = runs.sort_values("global_batch_size", kind="stable").drop(columns="reached")
    steps = _by_seed(runs)
    firsts = column_of(runs, "first_steps_to_target").astype(float)
    # A table of crossings that are not for good may know none before them.
    firsts = firsts.where(firsts < runs["steps_to_target"], runs["steps_to_target"])
    return Measurements(
        batches=steps.index.to_numpy(dtype=np.float64),
        log_steps=np.log(steps.to_numpy(dtype=np.float64)),
        log_first_steps=np.log(
            _by_seed(runs.assign(steps_to_target=firsts)).to_numpy(dtype=np.float64)
        ),
        runs=runs,
        excluded=excluded[excluded["reason"].ne("")].reset_index(),
        warnings=tuple(warnings),
    )


def _by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Arrange steps to the target by batch size and seed."""
    return runs.pivot(index="global_batch_size", columns="seed", values="steps_to_target")


def ends_of_range(
    measurements: Measurements, ends: tuple[float, float]
) -> tuple[Estimate, Estimate] | None:
    """Compare a batch size with a smaller one: how many times fewer steps, more samples.

    Parameters
    ----------
    ends : tuple of float
        The smaller and the larger one, in samples.

    Returns
    -------
    tuple of Estimate, or None
        Ratio of optimizer steps, smallest to largest, and of samples, largest to smallest:
        geometric means over the seeds of both. The interval is Student's over seeds, widened by
        where a noisy loss leaves a crossing open: at its low end the smaller batch stands at its
        first crossings and the larger at those for good, at its high end the reverse. None where
        one of the batch sizes is not there, or they share no seed.

    Notes
    -----
    Coverage at 95 % of the ratio of noiseless curves: 1,000 sweeps a case of batch sizes 8 and 128,
    evaluation noise of correlation 0.5 (normal, and Student's with three degrees of freedom), 5 %
    of scatter between seeds, seed 20; lowest of targets met in the steep and in the flat part of
    the curve, and of both kinds of noise, over the sweeps (37 to 100 %) whose runs all reached it.
    `test_the_ratio_covers_the_noiseless_one` repeats a part.

    ===================== ======= ======= ========
    noise of the loss     3 seeds 5 seeds 10 seeds
    ===================== ======= ======= ========
    5 %, as here          94 %    95 %    95 %
    10 %, as here         94 %    96 %    96 %
    20 %, as here         97 %    98 %    99 %
    30 %, as here         98 %    99 %    100 %
    30 %, not widened     92 %    90 %    88 %
    30 %, first crossings 92 %    91 %    84 %
    ===================== ======= ======= ========
    """
    if not np.isin(ends, measurements.batches).all():
        return None
    places = np.searchsorted(measurements.batches, ends)
    small, large = measurements.log_steps[places]
    shared = np.isfinite(small - large)
    logs = (small - large)[shared]
    n = len(logs)
    if n == 0:
        return None
    mean, half = float(logs.mean()), half_width(logs)
    # How much later, in the mean, each end was met for good than first.
    later = (measurements.log_steps - measurements.log_first_steps)[places][:, shared].mean(axis=1)
    fewer_steps = np.array([mean - half - later[0], mean, mean + half + later[1]])
    more_samples = float(np.log(ends[1] / ends[0])) - fewer_steps[::-1]
    method = f"t over {n} paired log ratios, from first crossings to those for good"

    def ratio(logs: NDArray[np.float64], what: str) -> Estimate:
        low, value, high = np.exp(logs).tolist()
        definition = f"ratio of {what} to the target, batch sizes {ends[0]:g} and {ends[1]:g}"
        return Estimate(value, low, high, n, "", method if n > 1 else "no interval", definition)

    return ratio(fewer_steps, "optimizer steps, smallest to largest"), ratio(
        more_samples, "samples, largest to smallest"
    )


def _checked(rows: pd.DataFrame) -> pd.DataFrame:
    """Refuse what is not of one target, and say who reached it."""
    for name, what in (("group", "group of settings"), ("target_loss", "target")):
        if column_of(rows, name).nunique(dropna=False) > 1:
            values = ", ".join(map(str, rows[name].unique()[:5]))
            raise AnalysisError(
                f"a trade-off is fitted for one {what} at a time; {name} has {values}: select one"
            )
    for size, rates in column_of(rows, "learning_rate").groupby(rows["global_batch_size"]):
        if rates.nunique() > 1:
            listed = ", ".join(f"{rate:g}" for rate in sorted(rates.dropna().unique()))
            raise AnalysisError(
                f"one learning rate a batch size is compared; batch size {size:g} has {listed}: "
                "choose one for each, for instance with at_best_learning_rate"
            )
    twice = rows[rows.duplicated(["global_batch_size", "seed"])]
    if len(twice):
        size, seed = twice.iloc[0][["global_batch_size", "seed"]]
        raise AnalysisError(
            f"seed {seed} appears more than once at batch size {size:g}: repeats of a run are not "
            "independent; give one row a run, or trajectory_id so that repeats can be dropped"
        )
    reached = np.isfinite(rows["steps_to_target"])
    if "outcome" in rows:
        reached &= rows["outcome"].eq("reached")
    return rows.assign(reached=reached)


def _penalty(log_samples: pd.DataFrame) -> tuple[float, str] | None:
    """Find the batch size below which smaller ones need significantly more samples."""
    # No form has samples to target that fall with the batch: learning rate, momentum or the noise
    # floor cost small batches what no form holds.
    if len(log_samples) < 3:
        return None
    sizes = log_samples.index.to_numpy(dtype=np.float64)
    means = log_samples.mean(axis=1).to_numpy(dtype=np.float64)
    least = int(means.argmin())
    excess = float(means[0] - means[least])
    if excess < _LEAST_PENALTY:
        return None
    # The batch size of the minimum was chosen among all others.
    limit = _PENALTY_LEVEL / (len(sizes) - 1)
    error, degrees = _error_of_difference(log_samples.iloc[[0, least]])
    if degrees < 1 or stdtr(degrees, -excess / max(error, 1e-300)) >= limit:
        return None
    return float(sizes[least]), (
        f"Batch size {sizes[0]:g} needs {significant(math.expm1(excess) * 100, 2)} % more samples "
        f"than {sizes[least]:g} (a penalty on small batches): only batch sizes from "
        f"{sizes[least]:g} are fitted."
    )


def _error_of_difference(logs: pd.DataFrame) -> tuple[float, int]:
    """Return the standard error of the difference of two rows' means, and its degrees of freedom.

    Seed by seed where two seeds or more are shared, else from both variances.
    """
    pairs = logs.diff().iloc[1].dropna()
    if len(pairs) > 1:
        return float(pairs.std() / np.sqrt(len(pairs))), len(pairs) - 1
    counts = logs.count(axis=1)
    if counts.min() < 2:
        return np.nan, 0
    return float(np.sqrt((logs.var(axis=1) / counts).sum())), int(counts.min()) - 1
