"""Tables of a report on the trade-off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.targets.choice import EARLIER, MOST_EARLY
from batchscape.analysis.tradeoff.fit import TradeoffFit

_PLACES = 60
_FITTED, _IF_ONE = "is_fitted", "if_one"


@dataclass(frozen=True)
class GroupFits:
    """The fits of one group at all targets, and its headline target."""

    number: int
    label: str
    """Empty where there is only one group."""
    fits: dict[float, TradeoffFit]
    target: float
    """Infinite where it has no name."""
    early: dict[float, tuple[int, int]]
    """By target, the runs that first met it early and those that reached it."""
    unsettled: str | None
    """Why no target may be a headline; None if `target` may."""
    headlines: dict[str, Estimate]
    """Estimates at that target, checked against the other readings of their words."""

    @property
    def fit(self) -> TradeoffFit:
        """The fit at that target."""
        return self.fits[self.target]

    @property
    def prefix(self) -> str:
        """What a sentence on this group starts with."""
        return f"{self.label}: " if self.label else ""


def tradeoff_tables(group_fits: Sequence[GroupFits]) -> list[Table]:
    """Make the tables of critical batches, and of steps with their fit if anything was fitted."""
    residuals = _residuals(group_fits)
    fitted = np.flatnonzero(residuals[_FITTED]).tolist()
    steps = Table(
        "tradeoff_fit",
        "Steps to target and their fit",
        residuals,
        [
            Column("group", is_left=True),
            Column("global_batch_size", "global batch", format=".0f", is_left=True),
            Column("runs"),
            Column("steps", "mean steps"),
            Column("fitted_steps", "fitted"),
            Column("residual_pct", "residual", "%", 2),
            Column("residual_error_pct", "error of the residual", "%", 2),
        ],
        fitted,
        notes=[
            "Mean steps: geometric, over seeds. Error of the residual: standard error, from seeds."
        ],
        hidden=["residual_pct", "residual_error_pct", _FITTED],
    )
    return [_critical(group_fits), *([steps] if fitted else [])]


def fitted_curves(group_fits: Sequence[GroupFits]) -> pd.DataFrame:
    """Follow every fit over its batch sizes, with its interval, beside perfect scaling."""
    curves: dict[tuple[int, float], pd.DataFrame] = {}
    for group in group_fits:
        for target, fit in group.fits.items():
            if fit.is_fitted:
                sizes, steps = fit.batches["global_batch_size"], fit.batches["steps"]
                places = np.geomspace(sizes.iloc[0], sizes.iloc[-1], _PLACES)
                critical = fit.critical_batch_size
                curves[group.number, target] = fit.predict(places).assign(
                    perfect_steps=steps.iloc[0] * sizes.iloc[0] / places,
                    critical_batch_size=critical.value,
                    critical_batch_size_low=critical.low,
                    critical_batch_size_high=critical.high,
                )
    if not curves:
        return pd.DataFrame()
    table = pd.concat(curves, names=["group", "target_loss"])
    return table.reset_index(["group", "target_loss"]).reset_index(drop=True)


def _target_rows(group: GroupFits) -> Iterator[dict[str, object]]:
    """Write the fit at each target as a row; the fits share runs, so their errors go together."""
    for target, fit in group.fits.items():
        (other,) = (each for form, each in fit.by_form.items() if form != fit.form)
        estimates = {
            "critical_batch_size": fit.critical_batch_size,
            "overhead_batch_size": fit.overhead_batch_size,
            "s_min": fit.s_min,
            "e_min": fit.fewest_samples,
            "exponent": fit.exponent,
            "other_critical_batch_size": other.critical_batch_size,
            _IF_ONE: fit.by_form["two_term"].critical_batch_size,
        }
        row: dict[str, object] = {"target_loss": target, "form": fit.form, "other_form": other.form}
        for name, estimate in estimates.items():
            row |= {
                name: estimate.value,
                f"{name}_low": estimate.low,
                f"{name}_high": estimate.high,
            }
        met_early, reached = group.early[target]
        yield row | {
            "n_seeds": fit.n_seeds,
            "n_batches": len(fit.batches),
            "batches_left_out": len(fit.excluded),
            "lack_of_fit_p": fit.lack_of_fit_p,
            "aicc": fit.forms["aicc"].get(fit.form, math.nan),
            "aicc_delta": fit.forms["delta"].get(fit.form),
            "identified": fit.is_identified,
            "note": fit.critical_batch_size.note,
            "runs": _run_names(fit.runs),
            "group": group.label,
            "group_number": group.number,
            "is_spoken_of": target == group.target and group.unsettled is None,
            "runs_met_early": met_early,
            "runs_reached": reached,
        }


def _run_names(runs: pd.DataFrame) -> str:
    """Join the ids of runs, where the table has them."""
    name = next((column for column in ("run_id", "run") if column in runs), None)
    return "" if name is None else " ".join(map(str, runs[name]))


def _critical(group_fits: Sequence[GroupFits]) -> Table:
    table = pd.DataFrame([row for group in group_fits for row in _target_rows(group)])
    fits = [fit for group in group_fits for fit in group.fits.values()]
    left_out = [fit.excluded["global_batch_size"] for fit in fits]
    early = table["runs_met_early"].astype(str) + " of " + table["runs_reached"].astype(str)
    first = group_fits[0].fit

    def estimate_column(name: str, header: str) -> Column:
        ends = (f"{name}_low", f"{name}_high")
        return Column(name, header, "", 3, *ends, n="n_seeds", missing=NOT_IDENTIFIED)

    return Table(
        "critical_batch",
        "Critical batch size by target",
        table,
        [
            Column("group", is_left=True),
            Column("target_loss", format="g", is_left=True),
            estimate_column("critical_batch_size", "critical batch (samples)"),
            estimate_column("exponent", "exponent"),
            *[estimate_column(_IF_ONE, "if the exponent is 1")]
            * any(fit.by_form["two_term"].is_fitted for fit in fits),
            estimate_column("overhead_batch_size", "overhead batch (samples)"),
            estimate_column("s_min", "fewest steps"),
            Column("n_batches", "batch sizes"),
            Column("n_seeds", "seeds"),
            Column("runs_met_early", "met early", texts=early),
            Column(
                "batches_left_out",
                "left out",
                texts=[", ".join(f"{size:g}" for size in sizes) or "none" for sizes in left_out],
            ),
        ],
        notes=[
            f"Critical batch, {first.critical_batch_size.definition}.",
            f"Overhead batch, {first.overhead_batch_size.definition}.",
            f"Fewest steps: {first.s_min.definition}.",
            "If the exponent is 1: the critical batch of S = a + b/B.",
            f"In brackets: {first.critical_batch_size.method}.",
            f"Met early: runs that first met the target more than {EARLIER * 100:g} % earlier than "
            f"for good. A target is a headline only if at most {MOST_EARLY * 100:g} % did.",
            "Left out: batch sizes of which a run did not reach the target, or with a "
            "small-batch penalty.",
        ],
        hidden=[_IF_ONE, f"{_IF_ONE}_low", f"{_IF_ONE}_high"],
    )


def _residuals(group_fits: Sequence[GroupFits]) -> pd.DataFrame:
    """Concatenate the batch sizes of each fit at its headline target."""
    tables = [pd.DataFrame()]
    for group in group_fits:
        table, runs = group.fit.batches, group.fit.runs
        behind = [runs[runs["global_batch_size"].eq(b)] for b in table["global_batch_size"]]
        table = table.assign(
            residual_pct=100 * np.expm1(table["residual"]),
            residual_error_pct=100 * table["residual_error"],
            group=group.label,
            run_ids=list(map(_run_names, behind)),
            **{_FITTED: group.fit.is_fitted},
        )
        tables.append(table)
    return pd.concat(tables, ignore_index=True)
