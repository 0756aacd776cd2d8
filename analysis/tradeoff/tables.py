"""Tables of a report on the trade-off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import Estimate, interval_text
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.grids import columns_grid, group_column
from batchscape.analysis.report.topic import TableView
from batchscape.analysis.targets.choice import EARLIER, MOST_EARLY
from batchscape.analysis.tradeoff.fit import TradeoffFit
from batchscape.analysis.tradeoff.forms import FORMULAS
from batchscape.analysis.tradeoff.targets import curve_of_fits, run_names

__all__ = ["GroupFits", "fitted_curves", "tradeoff_tables"]

_PLACES = 60
_OF_FORMS = ("critical_batch_size", "exponent", "s_min", "e_min")


@dataclass(frozen=True)
class GroupFits:
    """The fits of one group at all targets, and the target that is spoken of."""

    number: int
    label: str
    """Empty where there is only one group."""
    fits: dict[float, TradeoffFit]
    target: float
    """Infinite where it has no name."""
    early: dict[float, tuple[int, int]]
    """By target, the runs that first met it early and those that reached it."""
    unsettled: str | None
    """Why no target may be spoken of; None where the one above may."""
    headlines: dict[str, Estimate]
    """Numbers at that target, held against the other readings of their words."""

    @property
    def fit(self) -> TradeoffFit:
        """The fit at that target."""
        return self.fits[self.target]

    @property
    def prefix(self) -> str:
        """What a sentence on this group starts with."""
        return f"{self.label}: " if self.label else ""


def tradeoff_tables(found: Sequence[GroupFits]) -> list[TableView]:
    """Make all tables.

    Returns
    -------
    list of TableView
        Critical batch sizes by target; then, at the target that is spoken of, steps and their fit,
        and all forms. Those without rows are left out.
    """
    views = [
        _critical(found),
        _view(
            found,
            lambda fit: fit.batches,
            [
                "global batch",
                "runs",
                "mean steps",
                "fitted",
                "residual (%)",
                "error of the residual (%)",
            ],
            _fitted_row,
            name="tradeoff_fit",
            title="Steps to target and their fit",
            note="Mean steps: geometric, over seeds. Error of the residual: standard error, from "
            "seeds.",
        ),
        _view(
            found,
            _forms,
            [
                "form",
                "critical batch (samples)",
                "exponent",
                "fewest steps",
                "fewest samples",
                "rms residual (%)",
                "AICc",
                "above the best",
            ],
            _form_row,
            name="tradeoff_forms",
            title="Forms of the trade-off",
            note="Trusted from four batch sizes on: the free exponent, for its interval holds "
            "whether or not the exponent is 1; that of S = a + b/B holds only if it is. AICc over "
            "batch sizes, whose mean log steps are fitted with equal weights; a dash where they "
            "are too few for it. Fewest samples: a dash where the runs exclude S = a + b/B.",
        ),
    ]
    return [view for view in views if view.grid.rows]


def fitted_curves(found: Sequence[GroupFits]) -> pd.DataFrame:
    """Follow every fit over its batch sizes, beside perfect scaling.

    Returns
    -------
    DataFrame
        One row a group, target and global batch size (60 of each fit, evenly in logarithms):
        `group` (its number), `target_loss`, `global_batch_size`, `steps` (fitted), `low` and `high`
        (pointwise interval), `perfect_steps` (of half the steps at twice the batch, from the
        smallest batch size fitted on), and `critical_batch_size` with its ends, the same in all
        rows of a fit. Empty where nothing was fitted.
    """
    parts = [pd.DataFrame()]
    for group in found:
        for target, fit in group.fits.items():
            if fit.fitted is None:
                continue
            first, last = fit.batches.iloc[0], fit.batches.iloc[-1]
            sizes = np.geomspace(first["global_batch_size"], last["global_batch_size"], _PLACES)
            critical = fit.critical_batch_size
            own = fit.predict(sizes).assign(
                perfect_steps=first["steps"] * first["global_batch_size"] / sizes,
                critical_batch_size=critical.value,
                critical_batch_size_low=critical.low,
                critical_batch_size_high=critical.high,
            )
            own.insert(0, "group", group.number)
            own.insert(1, "target_loss", target)
            parts.append(own)
    return pd.concat(parts, ignore_index=True)


def _critical(found: Sequence[GroupFits]) -> TableView:
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
            for group in found
        ],
        ignore_index=True,
    )
    fits = [(group, target, fit) for group in found for target, fit in group.fits.items()]
    two_term = (fit.of_form("two_term") for *_, fit in fits)
    left_out = (fit.excluded["global_batch_size"] for *_, fit in fits)
    first = found[0].fit
    grid = columns_grid(
        [
            *group_column(group.label for group, *_ in fits),
            ("target loss", [MISSING if math.isinf(t) else f"{t:g}" for _, t, _ in fits]),
        ],
        [
            ("critical batch (samples)", [fit.critical_batch_size.text() for *_, fit in fits]),
            ("exponent", [fit.exponent.text() for *_, fit in fits]),
            (
                "if the exponent is 1",
                [MISSING if two is None else two.critical_batch_size.text() for two in two_term],
            ),
            ("overhead batch (samples)", [fit.overhead_batch_size.text() for *_, fit in fits]),
            ("fewest steps", [fit.s_min.text() for *_, fit in fits]),
            ("batch sizes", [str(len(fit.batches)) for *_, fit in fits]),
            ("seeds", [str(fit.n_seeds) for *_, fit in fits]),
            ("met early", ["{} of {}".format(*g.early[t]) for g, t, _ in fits]),
            (
                "left out",
                [", ".join(f"{size:g}" for size in sizes) or "none" for sizes in left_out],
            ),
        ],
        notes=[
            f"Critical batch, {first.critical_batch_size.definition}.",
            f"Overhead batch, {first.overhead_batch_size.definition}.",
            f"Fewest steps: {first.s_min.definition}.",
            "If the exponent is 1: the critical batch of S = a + b/B.",
            f"In brackets: {first.critical_batch_size.method}.",
            f"Met early: runs that first met the target more than {EARLIER * 100:g} % earlier than "
            f"for good. A target is spoken of where at most {MOST_EARLY * 100:g} % did.",
            "Left out: batch sizes of which a run did not reach the target, or with a "
            "small-batch penalty.",
        ],
    )
    return TableView("critical_batch", "Critical batch size by target", table, grid)


def _view(
    found: Sequence[GroupFits],
    table_of: Callable[[TradeoffFit], pd.DataFrame],
    headers: Sequence[str],
    row_of: Callable[[dict[str, float]], list[str]],
    *,
    name: str,
    title: str,
    note: str,
) -> TableView:
    """Put tables of the fits that are spoken of under each other."""
    tables, shown, labels = [pd.DataFrame()], [], []
    for group in found:
        own, runs = table_of(group.fit), group.fit.runs
        # What was not fitted has its batch sizes alone.
        if "global_batch_size" in own:
            behind = [runs[runs["global_batch_size"].eq(b)] for b in own["global_batch_size"]]
        else:
            behind = [runs] * len(own)
        tables.append(own.assign(group=group.label, run_ids=list(map(run_names, behind))))
        if group.fit.fitted is not None:
            rows = own.to_dict("records")
            shown += [row_of({str(key): value for key, value in row.items()}) for row in rows]
            labels += [group.label] * len(rows)
    first, *others = ((h, [row[i] for row in shown]) for i, h in enumerate(headers))
    grid = columns_grid([*group_column(labels), first], others, notes=[note])
    return TableView(name, title, pd.concat(tables, ignore_index=True), grid)


def _fitted_row(row: dict[str, float]) -> list[str]:
    return [
        f"{row['global_batch_size']:g}",
        str(row["runs"]),
        significant(row["steps"], 4),
        significant(row["fitted_steps"], 4),
        significant(100 * math.expm1(row["residual"]), 2),
        significant(100 * row["residual_error"], 2),
    ]


def _forms(fit: TradeoffFit) -> pd.DataFrame:
    """Put what each form gives behind how well it fits."""
    table = fit.forms.reset_index()
    fits = [fit.of_form(name) if name in FORMULAS else None for name in table["form"]]
    for name in _OF_FORMS:
        attribute = "fewest_samples" if name == "e_min" else name
        estimates = [None if own is None else getattr(own, attribute) for own in fits]
        for part in ("value", "low", "high"):
            column = name if part == "value" else f"{name}_{part}"
            table[column] = [
                math.nan if estimate is None else getattr(estimate, part) for estimate in estimates
            ]
    return table.assign(n_seeds=fit.n_seeds)


def _form_row(row: dict[str, float]) -> list[str]:
    return [
        str(row["formula"]),
        *(
            interval_text(row[name], row[f"{name}_low"], row[f"{name}_high"], int(row["n_seeds"]))
            for name in _OF_FORMS
        ),
        significant(100 * row["rms_residual"], 2),
        *(
            significant(row[name], digits) if math.isfinite(row[name]) else MISSING
            for name, digits in (("aicc", 3), ("delta", 2))
        ),
    ]
