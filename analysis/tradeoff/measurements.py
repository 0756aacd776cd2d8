"""Log steps to a target by batch size and seed, which a trade-off is fitted to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr

from batchscape.analysis.estimates import Estimate, half_width
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
    left_out = []
    complete = []
    for _, cell in rows.groupby("global_batch_size", sort=True):
        if cell["reached"].all():
            complete.append(cell)
        else:
            left_out.append(_censored(cell))
    warnings = [
        f"Batch size {row['global_batch_size']:g} is left out of the fit: {row['reason']}."
        for row in left_out
    ]
    penalty = _penalty(complete)
    if penalty is not None:
        first_fitted, text = penalty
        warnings.append(text)
        left_out += [_excluded_row(cell, "small-batch penalty") for cell in complete[:first_fitted]]
        complete = complete[first_fitted:]
    fitted_runs = pd.concat(complete) if complete else rows.iloc[:0]
    firsts = fitted_runs.get("first_steps_to_target", fitted_runs["steps_to_target"]).astype(float)
    # A table of crossings that are not for good may know none before them.
    firsts = firsts.where(firsts < fitted_runs["steps_to_target"], fitted_runs["steps_to_target"])
    cells = {"index": "global_batch_size", "columns": "seed"}
    table = fitted_runs.pivot(**cells, values="steps_to_target")
    first_table = fitted_runs.assign(first=firsts).pivot(**cells, values="first")
    excluded = pd.DataFrame(left_out, columns=list(_EXCLUDED)).astype(_EXCLUDED)
    return Measurements(
        batches=table.index.to_numpy(dtype=np.float64),
        log_steps=np.log(table.to_numpy(dtype=np.float64)),
        log_first_steps=np.log(first_table.to_numpy(dtype=np.float64)),
        runs=fitted_runs.drop(columns="reached"),
        excluded=excluded.sort_values("global_batch_size", ignore_index=True),
        warnings=tuple(warnings),
    )


def ends_of_range(
    measurements: Measurements, ends: tuple[float, float] | None = None
) -> tuple[Estimate, Estimate] | None:
    """Compare the largest batch size with the smallest: how many times fewer steps, more samples.

    Parameters
    ----------
    ends : tuple of float, optional
        Batch sizes to compare, in samples; the smallest and the largest if not given.

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
    smallest, largest = ends or (measurements.batches[0], measurements.batches[-1])
    if not {smallest, largest} <= set(measurements.batches.tolist()):
        return None
    places = np.searchsorted(measurements.batches, [smallest, largest])
    small, large = measurements.log_steps[places]
    shared = np.isfinite(small - large)
    logs = (small - large)[shared]
    n = len(logs)
    if n == 0:
        return None
    mean, half = float(logs.mean()), half_width(logs)
    # How much later, in the mean, each end was met for good than first.
    later = (measurements.log_steps - measurements.log_first_steps)[places][:, shared].mean(axis=1)
    ends_of_log = np.array([mean - half - later[0], mean, mean + half + later[1]])
    span = float(np.log(largest / smallest))
    method = f"t over {n} paired log ratios, from first crossings to those for good"

    def ratio(logs: NDArray[np.float64], what: str) -> Estimate:
        low, value, high = np.exp(np.sort(logs) if n > 1 else logs).tolist()
        definition = f"ratio of {what} to the target, batch sizes {smallest:g} and {largest:g}"
        return Estimate(value, low, high, n, "", method if n > 1 else "no interval", definition)

    return ratio(ends_of_log, "optimizer steps, smallest to largest"), ratio(
        span - ends_of_log, "samples, largest to smallest"
    )


def _checked(rows: pd.DataFrame) -> pd.DataFrame:
    """Refuse what is not of one target, and say who reached it."""
    for name, what in (("group", "group of settings"), ("target_loss", "target")):
        if name in rows.columns and rows[name].nunique(dropna=False) > 1:
            values = ", ".join(str(value) for value in rows[name].unique()[:5])
            msg = f"a trade-off is fitted for one {what} at a time; {name} has {values}: select one"
            raise AnalysisError(msg)
    _refuse_mixed_rates(rows)
    twice = rows.duplicated(["global_batch_size", "seed"])
    if twice.any():
        row = rows[twice].iloc[0]
        msg = (
            f"seed {row['seed']} appears more than once at batch size "
            f"{row['global_batch_size']:g}: repeats of a run are not independent; give one row a "
            "run, or trajectory_id so that repeats can be dropped"
        )
        raise AnalysisError(msg)
    reached = np.isfinite(rows["steps_to_target"])
    if "outcome" in rows.columns:
        reached &= rows["outcome"].eq("reached")
    return rows.assign(reached=reached)


def _refuse_mixed_rates(rows: pd.DataFrame) -> None:
    if "learning_rate" not in rows.columns:
        return
    rates = rows.groupby("global_batch_size")["learning_rate"]
    counts = rates.nunique()
    if (counts > 1).any():
        size = counts.idxmax()
        listed = ", ".join(f"{rate:g}" for rate in sorted(rates.get_group(size).dropna().unique()))
        msg = (
            f"one learning rate a batch size is compared; batch size {size:g} has {listed}: choose "
            "one for each, for instance with at_best_learning_rate"
        )
        raise AnalysisError(msg)


def _censored(cell: pd.DataFrame) -> dict[str, object]:
    """Describe a batch size with a run that did not reach the target."""
    n, reached = len(cell), int(cell["reached"].sum())
    counts = cell.loc[~cell["reached"]].get("outcome", pd.Series(dtype=str)).value_counts()
    kinds = ", ".join(f"{count} {name}" for name, count in counts.items())
    reason = f"{n - reached} of {n} runs did not reach the target" + (
        f" ({kinds})" if kinds else ""
    )
    return _excluded_row(cell, reason)


def _excluded_row(cell: pd.DataFrame, reason: str) -> dict[str, object]:
    return {
        "global_batch_size": cell["global_batch_size"].iloc[0],
        "runs": len(cell),
        "reached": int(cell["reached"].sum()),
        "reason": reason,
    }


def _penalty(cells: list[pd.DataFrame]) -> tuple[int, str] | None:
    """Find the batch size below which smaller ones need significantly more samples."""
    # No form has samples to target that fall with the batch: learning rate, momentum or the noise
    # floor cost small batches what no form holds.
    if len(cells) < 3:
        return None
    samples = [
        np.log((cell["steps_to_target"] * cell["global_batch_size"]).to_numpy()) for cell in cells
    ]
    means = np.array([values.mean() for values in samples])
    least = int(means.argmin())
    excess = means[0] - means[least]
    if least == 0 or excess < _LEAST_PENALTY:
        return None
    error, degrees = _error_of_difference(cells[0], cells[least])
    sizes = [cell["global_batch_size"].iloc[0] for cell in (cells[0], cells[least])]
    excess_text = (
        f"Batch size {sizes[0]:g} needs {significant(float(np.expm1(excess)) * 100, 2)} % more "
        f"samples than {sizes[1]:g}"
    )
    # The batch size of the minimum was chosen among all others.
    limit = _PENALTY_LEVEL / (len(cells) - 1)
    if degrees < 1 or stdtr(degrees, -excess / max(error, 1e-300)) >= limit:
        return None
    return (
        least,
        f"{excess_text} (a penalty on small batches): only batch sizes from {sizes[1]:g} are "
        "fitted.",
    )


def _error_of_difference(cell: pd.DataFrame, other_cell: pd.DataFrame) -> tuple[float, int]:
    """Return the standard error of a difference of mean log steps, and its degrees of freedom.

    Seed by seed where two seeds or more are shared, else from both variances.
    """
    logs = [np.log(each.set_index("seed")["steps_to_target"]) for each in (cell, other_cell)]
    pairs = (logs[0] - logs[1]).dropna().to_numpy()
    if len(pairs) > 1:
        return float(pairs.std(ddof=1) / np.sqrt(len(pairs))), len(pairs) - 1
    if min(map(len, logs)) < 2:
        return np.nan, 0
    variances = [float(values.var(ddof=1)) / len(values) for values in logs]
    return float(np.sqrt(sum(variances))), min(map(len, logs)) - 1


_EXCLUDED = {
    "global_batch_size": "float64",
    "runs": "int64",
    "reached": "int64",
    "reason": "object",
}
