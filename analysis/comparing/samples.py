"""Unpaired runs: two samples, one against a constant, their spread, and their divergence.

A table has one row a run. Where runs of two sides share their samples and seeds, paired differences
are more precise (`compare_sweeps`, `tost`); most foreign tables do not say whether they do.

Sources: two samples of unlike spreads: Welch 1947, doi:10.1093/biomet/34.1-2.28. Several
comparisons: Holm 1979. Interval of a variance: NIST/SEMATECH e-Handbook, section 1.3.5.8. Interval
of a share: Clopper and Pearson 1934, doi:10.1093/biomet/26.4.404.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import betaincinv, chdtri, stdtr

from batchscape.analysis.equivalence.tost import Tost, tost_unpaired, welch
from batchscape.analysis.estimates import LEVEL, TWO_SIDED, Estimate, t_reach
from batchscape.analysis.multiplicity import holm
from batchscape.analysis.targets.columns import numbers_of
from batchscape.analysis.targets.tidy import refuse_missing
from batchscape.errors import AnalysisError
from batchscape.text import count_text

_CELL = ("group", "target_loss", "global_batch_size", "learning_rate")
"""Columns that distinguish cells, as far as a table has them."""
_OUTCOMES = ("outcome", "status", "final_eval_loss")
"""Columns that show whether a run diverged."""


@dataclass(frozen=True)
class TwoSamples:
    """Two samples of runs, set side by side."""

    reference: str
    other: str
    n_reference: int
    n_other: int
    difference: Estimate
    """Mean of the other minus mean of the reference, with Welch's t-interval."""
    p_different: float
    """p value of the two-sided test that there is no difference; NaN where it has none."""
    p_adjusted: float
    """The same by Holm, for the number of comparisons."""
    equivalence: Tost | None
    """Two one-sided tests with the same standard error; None without a margin."""


@dataclass(frozen=True)
class OneSided:
    """A mean against a constant that was fixed beforehand."""

    mean: Estimate
    """With a one-sided interval: only one end is finite."""
    constant: float
    alternative: Literal["less", "greater"]
    p: float
    """p value of the t-test; NaN where it has none."""
    verdict: Literal["shown", "not shown", "not identified"]
    """Shown: the interval leaves the constant out. Not shown is no proof of the contrary."""


def compare_samples(
    table: pd.DataFrame,
    value: str,
    by: str,
    *,
    reference: object = None,
    margin: float | None = None,
) -> tuple[TwoSamples, ...]:
    """Compare the mean of a column between groups of independent runs.

    Parameters
    ----------
    table : DataFrame
        One row a run, all else equal but `by` and seeds.
    value : str
        Column to compare, such as `final_eval_loss`; infinite where a run diverged.
    by : str
        Column whose values name the samples.
    reference : object, optional
        Value of `by` that the others are compared with; the first in the table if not given.
    margin : float, optional
        In the unit of the value, fixed before it was seen: adds two one-sided tests.

    Returns
    -------
    tuple of TwoSamples
        One for each other value of `by`, in order of appearance.

    Raises
    ------
    AnalysisError
        If columns are missing, a value or sample is none, there is no second sample, or the
        reference is not one of them.

    Notes
    -----
    Source: Welch 1947, doi:10.1093/biomet/34.1-2.28; Holm 1979 for the adjusted p values;
    Schuirmann 1987, doi:10.1007/BF01068419, for the equivalence.
    """
    refuse_missing(table, [value, by], "a comparison of samples")
    unnamed = int(table[by].isna().sum())
    if unnamed:
        msg = (
            f"{by} is missing in {unnamed} of {len(table)} rows; leave out runs of no sample, or "
            "name theirs"
        )
        raise AnalysisError(msg)
    samples: dict[object, NDArray[np.float64]] = {
        name: _values(rows, value) for name, rows in table.groupby(by, sort=False)
    }
    first = next(iter(samples)) if reference is None else reference
    if first not in samples or len(samples) < 2:
        sample_names = ", ".join(map(str, samples))
        msg = (
            "a comparison needs two samples, one of them the reference; "
            f"{by} has {sample_names}, and the reference is {first}"
        )
        raise AnalysisError(msg)
    base = samples.pop(first)
    compared = [
        _two_samples((str(first), base), (str(name), rows), value, margin)
        for name, rows in samples.items()
    ]
    adjusted = holm([comparison.p_different for comparison in compared])
    return tuple(
        replace(comparison, p_adjusted=float(p))
        for comparison, p in zip(compared, adjusted, strict=True)
    )


def one_sided_test(
    table: pd.DataFrame,
    value: str,
    constant: float,
    *,
    alternative: Literal["less", "greater"] = "less",
) -> OneSided:
    """Test whether the mean of a column lies below, or above, a constant.

    Parameters
    ----------
    table : DataFrame
        One row a run.
    value : str
        Column whose mean is tested; infinite where a run diverged.
    constant : float
        In the unit of the value, fixed before it was seen: a published figure, say.
    alternative : {"less", "greater"}
        What is to be shown of the mean.

    Raises
    ------
    AnalysisError
        If the column is missing, a value is none, or the constant is not finite.

    Notes
    -----
    Source: Student 1908, doi:10.1093/biomet/6.1.1.
    """
    refuse_missing(table, [value], "a test against a constant")
    if alternative not in {"less", "greater"} or not math.isfinite(constant):
        msg = (
            "a one-sided test is of a mean that is 'less' or 'greater' than a finite constant, got "
            f"{alternative=}, {constant=}"
        )
        raise AnalysisError(msg)
    values = _values(table, value)
    n = len(values)
    definition = f"mean of {value}"
    if n < 2 or not np.isfinite(values).all():
        return OneSided(
            _without_interval(values, definition), constant, alternative, math.nan, "not identified"
        )
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n)
    reach = t_reach(error, n - 1, 2 * LEVEL - 1)
    is_less = alternative == "less"
    bound = mean + reach if is_less else mean - reach
    low, high = (-math.inf, bound) if is_less else (bound, math.inf)
    is_shown = bound < constant if is_less else bound > constant
    beyond = constant - mean if is_less else mean - constant
    # Runs without any spread lie on one side, whatever their number.
    p = float(stdtr(n - 1, -beyond / error)) if error else float(beyond <= 0)
    estimate = Estimate(mean, low, high, n, "", f"one-sided t-interval over {n} runs", definition)
    return OneSided(estimate, constant, alternative, p, "shown" if is_shown else "not shown")


def pooled_spread(table: pd.DataFrame, value: str) -> Estimate:
    """Estimate the spread over seeds that the runs of all cells share.

    Cells are distinguished by `group`, `target_loss`, `global_batch_size` and `learning_rate`, as
    far as the table has them.

    Parameters
    ----------
    table : DataFrame
        One row a run.
    value : str
        Column that spreads; runs whose value is infinite or missing are left out, and counted in
        the note.

    Returns
    -------
    Estimate
        Standard deviation within a cell, with n runs behind it; not identified where no cell has
        two runs.

    Raises
    ------
    AnalysisError
        If columns are missing or a value is no number.

    Notes
    -----
    The root of the variances' mean, weighted by their degrees of freedom; the interval is that of
    chi-square with their sum, and takes cells to spread alike. Source: NIST/SEMATECH e-Handbook of
    Statistical Methods, section 1.3.5.8.
    """
    names = [name for name in _CELL if name in table]
    refuse_missing(table, [value, *names], "a pooled spread")
    numbers = numbers_of(table, value)
    finite = table[names].assign(value=numbers)[np.isfinite(numbers)]
    spreads = (
        finite.groupby(names or (lambda _: 0), dropna=False)["value"]
        .agg(["var", "count"])
        .query("count > 1")
    )
    freedom, n_left_out = int((spreads["count"] - 1).sum()), len(table) - len(finite)
    definition = f"standard deviation of {value} over runs that differ in their seed alone"
    note = f"{n_left_out} runs without a finite value are left out" if n_left_out else None
    if not freedom:
        return Estimate.unknown("no cell has two runs with a finite value", 0, definition)
    squares = float((spreads["var"] * (spreads["count"] - 1)).sum())
    low, high = (
        math.sqrt(squares / float(chdtri(freedom, 1 - share)))
        for share in (TWO_SIDED, 1 - TWO_SIDED)
    )
    method = f"chi-square with {freedom} degrees of freedom, pooled over {len(spreads)} cells"
    spread = math.sqrt(squares / freedom)
    return Estimate(spread, low, high, int(spreads["count"].sum()), "", method, definition, note)


def divergence_rate(table: pd.DataFrame) -> Estimate:
    """Estimate the share of runs that diverge.

    Parameters
    ----------
    table : DataFrame
        With `outcome`, `status`, or `final_eval_loss`, which is infinite for a diverged run. A run
        without any of them is left out, and counted in the note. Of a run with several targets the
        row of the lowest counts.

    Returns
    -------
    Estimate
        With the interval of Clopper and Pearson, which holds the share at least as often as
        `LEVEL` says, at any number of runs; not identified where no run has an outcome.

    Raises
    ------
    AnalysisError
        If the table is empty or has none of these columns.

    Notes
    -----
    Source: Clopper and Pearson 1934, doi:10.1093/biomet/26.4.404.
    """
    diverged, unknown = _diverged(_one_row_a_run(table))
    count, n = int(diverged.sum()), len(diverged)
    definition = "share of runs that diverged"
    left_out = f"{unknown} runs without {', '.join(_OUTCOMES)} are left out" if unknown else ""
    if not n:
        return Estimate.unknown(left_out, 0, definition)
    without = n - count
    return Estimate(
        value=count / n,
        low=float(betaincinv(count, without + 1, 1 - TWO_SIDED)) if count else 0.0,
        high=float(betaincinv(count + 1, without, TWO_SIDED)) if without else 1.0,
        n=n,
        unit="",
        method=f"Clopper-Pearson over {n} runs",
        definition=definition,
        note="; ".join([f"{count} of {n}", *([left_out] if left_out else [])]),
    )


def divergence_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Estimate the share of runs that diverge, cell by cell.

    Parameters
    ----------
    table : DataFrame
        As for `divergence_rate`; cells are distinguished by `group`, `global_batch_size` and
        `learning_rate`, as far as it has them.

    Returns
    -------
    DataFrame
        One row a cell: the columns above, `n`, `diverged`, `rate`, `low` and `high`.

    Raises
    ------
    AnalysisError
        As `divergence_rate` does.
    """
    runs = _one_row_a_run(table)
    names = [name for name in _CELL if name in table and name != "target_loss"]
    rows = []
    for key, cell_runs in runs.groupby(names, dropna=False) if names else [((), runs)]:
        rate = divergence_rate(cell_runs)
        count = round(rate.value * rate.n) if rate.n else 0
        numbers = {"n": rate.n, "diverged": count, "rate": rate.value}
        ends = {"low": rate.low, "high": rate.high}
        rows.append({**dict(zip(names, key, strict=True)), **numbers, **ends})
    return pd.DataFrame(rows)


def _two_samples(
    reference: tuple[str, NDArray[np.float64]],
    other: tuple[str, NDArray[np.float64]],
    value: str,
    margin: float | None,
) -> TwoSamples:
    (first, base), (second, values) = reference, other
    equivalence = None if margin is None else tost_unpaired(values, base, margin)
    definition = f"mean {value} of {second} minus that of {first}"
    both = np.concatenate([base, values])
    p = math.nan
    if min(len(base), len(values)) < 2 or not np.isfinite(both).all():
        estimate = _without_interval(both, definition)
        if np.isfinite(both).all():
            difference = float(values.mean() - base.mean())
            counts = f"{len(base)} and {len(values)} runs; an interval needs 2 of each"
            estimate = replace(estimate, value=difference, note=counts)
    else:
        mean, error, freedom = welch(values, base)
        half = t_reach(error, freedom)
        p = 2 * float(stdtr(freedom, -abs(mean) / error)) if error else float(mean == 0)
        method = f"Welch's t with {freedom:.3g} degrees of freedom"
        estimate = Estimate(mean, mean - half, mean + half, len(both), "", method, definition)
    return TwoSamples(first, second, len(base), len(values), estimate, p, math.nan, equivalence)


def _without_interval(values: NDArray[np.float64], definition: str) -> Estimate:
    """Return an estimate without an interval, with the reason."""
    missing, n, infinite = math.nan, len(values), int(np.isinf(values).sum())
    if infinite:
        return Estimate.unknown(f"{infinite} of {n} runs have no finite value", n, definition)
    mean = float(values.mean())
    why = f"{count_text(n, 'run')}; an interval needs 2"
    return Estimate(mean, missing, missing, n, "", "none", definition, why)


def _values(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    numbers = numbers_of(table, name)
    if np.isnan(numbers).any():
        msg = (
            f"{name} is missing in {int(np.isnan(numbers).sum())} of {len(numbers)} rows; leave "
            "out runs without a value, and give those that diverged an infinite one"
        )
        raise AnalysisError(msg)
    return numbers


def _one_row_a_run(table: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows of the lowest target that runs of a cell and seed have: one a run."""
    outcomes = [n for n in _OUTCOMES if n in table]
    if table.empty or not outcomes:
        msg = (
            "a rate of divergence needs runs with outcome, status or final_eval_loss; the table "
            f"has {len(table)} rows and {', '.join(map(str, table.columns)) or 'no columns'}"
        )
        raise AnalysisError(msg)
    if "target_loss" not in table:
        return table
    # A run may reach a target and diverge on its way to a lower one.
    target = table["target_loss"].fillna(np.inf)
    names = [n for n in (*_CELL, "seed") if n in table and n != "target_loss"]
    targets_of_run = target.groupby([table[n] for n in names], dropna=False) if names else None
    return table[
        target.eq(target.min() if targets_of_run is None else targets_of_run.transform("min"))
    ]


def _diverged(runs: pd.DataFrame) -> tuple[NDArray[np.bool_], int]:
    """Return whether each run with an outcome diverged, and the number of other runs."""
    diverged, has_outcome = np.zeros((2, len(runs)), dtype=bool)
    for name in (n for n in _OUTCOMES if n in runs):
        if name == "final_eval_loss":
            losses = numbers_of(runs, name)
            diverged |= np.isinf(losses)
            has_outcome |= ~np.isnan(losses)
        else:
            diverged |= runs[name].eq("diverged").to_numpy(dtype=bool)
            has_outcome |= runs[name].notna().to_numpy(dtype=bool)
    return diverged[has_outcome], int((~has_outcome).sum())
