"""Tables of a report on the trade-off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.targets.choice import EARLIER, MOST_EARLY
from batchscape.analysis.tradeoff.fit import TradeoffFit
from batchscape.analysis.tradeoff.forms import FORMULAS
from batchscape.analysis.tradeoff.targets import curve_of_fits, run_names

_PLACES = 60
_FITTED = "is_fitted"
_OF_FORMS = {
    "critical_batch_size": "critical batch (samples)",
    "exponent": "exponent",
    "s_min": "fewest steps",
    "e_min": "fewest samples",
}


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
    """Make the tables of critical batches, of steps with their fit, and of forms."""
    return [
        _critical(group_fits),
        *_fitted(
            Table(
                "tradeoff_fit",
                "Steps to target and their fit",
                _stacked(group_fits, _residuals),
                [
                    Column("global_batch_size", "global batch", format=".0f", is_left=True),
                    Column("runs"),
                    Column("steps", "mean steps"),
                    Column("fitted_steps", "fitted"),
                    Column("residual_pct", "residual", "%", 2),
                    Column("residual_error_pct", "error of the residual", "%", 2),
                ],
                notes=[
                    "Mean steps: geometric, over seeds. Error of the residual: standard error, "
                    "from seeds."
                ],
                hidden=["residual_pct", "residual_error_pct"],
            )
        ),
        *_fitted(
            Table(
                "tradeoff_forms",
                "Forms of the trade-off",
                _stacked(group_fits, _forms),
                [
                    Column("formula", "form", is_left=True),
                    *(
                        Column(name, header, "", 3, f"{name}_low", f"{name}_high", n="n_seeds")
                        for name, header in _OF_FORMS.items()
                    ),
                    Column("rms_residual_pct", "rms residual", "%", 2),
                    Column("known_aicc", "AICc", format=3),
                    Column("known_delta", "above the best", format=2),
                ],
                notes=[
                    "Trusted from four batch sizes on: the free exponent, for its interval holds "
                    "whether or not the exponent is 1; that of S = a + b/B holds only if it is. "
                    "AICc over batch sizes, whose mean log steps are fitted with equal weights; "
                    "a dash where they are too few for it. Fewest samples: a dash where the runs "
                    "exclude S = a + b/B.",
                ],
                hidden=["rms_residual_pct", "known_aicc", "known_delta"],
            )
        ),
    ]


def fitted_curves(group_fits: Sequence[GroupFits]) -> pd.DataFrame:
    """Follow every fit over its batch sizes, with its interval, beside perfect scaling."""
    parts = [pd.DataFrame()]
    for group in group_fits:
        for target, fit in group.fits.items():
            if fit.fitted is None:
                continue
            first, last = fit.batches.iloc[0], fit.batches.iloc[-1]
            sizes = np.geomspace(first["global_batch_size"], last["global_batch_size"], _PLACES)
            critical = fit.critical_batch_size
            curve = fit.predict(sizes).assign(
                perfect_steps=first["steps"] * first["global_batch_size"] / sizes,
                critical_batch_size=critical.value,
                critical_batch_size_low=critical.low,
                critical_batch_size_high=critical.high,
            )
            curve.insert(0, "group", group.number)
            curve.insert(1, "target_loss", target)
            parts.append(curve)
    return pd.concat(parts, ignore_index=True)


def _critical(group_fits: Sequence[GroupFits]) -> Table:
    table = pd.concat(
        [
            curve_of_fits(group.fits).assign(
                group=group.label,
                group_number=group.number,
                is_spoken_of=[
                    target == group.target and group.unsettled is None for target in group.fits
                ],
                runs_met_early=[group.early[target][0] for target in group.fits],
                runs_reached=[group.early[target][1] for target in group.fits],
            )
            for group in group_fits
        ],
        ignore_index=True,
    )
    fits = [fit for group in group_fits for fit in group.fits.values()]
    two_term = [fit.of_form("two_term") for fit in fits]
    two_term_critical = [None if fit is None else fit.critical_batch_size for fit in two_term]
    hidden = {
        f"if_one{end}": [
            math.nan if one is None else float(getattr(one, part)) for one in two_term_critical
        ]
        for end, part in (("", "value"), ("_low", "low"), ("_high", "high"))
    }
    left_out = [fit.excluded["global_batch_size"] for fit in fits]
    early = table["runs_met_early"].astype(str) + " of " + table["runs_reached"].astype(str)
    first = group_fits[0].fit

    def estimate(name: str, header: str) -> Column:
        ends = (f"{name}_low", f"{name}_high")
        return Column(name, header, "", 3, *ends, n="n_seeds", missing=NOT_IDENTIFIED)

    return Table(
        "critical_batch",
        "Critical batch size by target",
        table.assign(**hidden),
        [
            Column("group", is_left=True),
            Column("target_loss", format="g", is_left=True),
            estimate("critical_batch_size", "critical batch (samples)"),
            estimate("exponent", "exponent"),
            *([estimate("if_one", "if the exponent is 1")] if any(two_term_critical) else []),
            estimate("overhead_batch_size", "overhead batch (samples)"),
            estimate("s_min", "fewest steps"),
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
        hidden=list(hidden),
    )


def _fitted(table: Table) -> list[Table]:
    """Show the rows of fits; no table if nothing was fitted."""
    rows = np.flatnonzero(table.frame[_FITTED]).tolist()
    columns = [Column("group", is_left=True), *table.columns]
    hidden = [*table.hidden, _FITTED]
    return [replace(table, columns=columns, rows=rows, hidden=hidden)] if rows else []


def _stacked(
    group_fits: Sequence[GroupFits], table_of: Callable[[TradeoffFit], pd.DataFrame]
) -> pd.DataFrame:
    """Concatenate a table of each fit at its headline target."""
    tables = [pd.DataFrame()]
    for group in group_fits:
        table, runs = table_of(group.fit), group.fit.runs
        # Without a fit there is a row a batch size, and no row a form.
        if "global_batch_size" in table:
            behind = [runs[runs["global_batch_size"].eq(b)] for b in table["global_batch_size"]]
        else:
            behind = [runs] * len(table)
        names = list(map(run_names, behind))
        is_fitted = group.fit.fitted is not None
        tables.append(table.assign(group=group.label, run_ids=names, **{_FITTED: is_fitted}))
    return pd.concat(tables, ignore_index=True)


def _residuals(fit: TradeoffFit) -> pd.DataFrame:
    if fit.fitted is None:
        return fit.batches
    return fit.batches.assign(
        residual_pct=100 * np.expm1(fit.batches["residual"]),
        residual_error_pct=100 * fit.batches["residual_error"],
    )


def _forms(fit: TradeoffFit) -> pd.DataFrame:
    """Put what each form gives behind how well it fits."""
    table = fit.forms.reset_index()
    fits = [fit.of_form(name) if name in FORMULAS else None for name in table["form"]]
    for name in _OF_FORMS:
        attribute = "fewest_samples" if name == "e_min" else name
        estimates = [
            None if form_fit is None else getattr(form_fit, attribute) for form_fit in fits
        ]
        for part in ("value", "low", "high"):
            column = name if part == "value" else f"{name}_{part}"
            table[column] = [
                math.nan if estimate is None else getattr(estimate, part) for estimate in estimates
            ]
    if "rms_residual" in table:
        table["rms_residual_pct"] = 100 * table["rms_residual"]
        for name in ("aicc", "delta"):
            table[f"known_{name}"] = table[name].where(np.isfinite(table[name]))
    return table.assign(n_seeds=fit.n_seeds)
