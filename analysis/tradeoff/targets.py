"""The critical batch size as a curve over target losses."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.tradeoff.fit import TradeoffFit, fit_tradeoff
from batchscape.analysis.tradeoff.forms import Form

_ESTIMATES = ("critical_batch_size", "overhead_batch_size", "s_min", "e_min", "exponent")


def fit_targets(
    reaches: pd.DataFrame,
    *,
    form: Form | None = None,
    overhead: float = 0.2,
    reference_batch_size: float | None = None,
) -> dict[float, TradeoffFit]:
    """Fit the trade-off at every target of one group, from the highest loss to the lowest."""
    targets = sorted(reaches["target_loss"].unique(), reverse=True)
    return {
        float(target): fit_tradeoff(
            reaches[reaches["target_loss"] == target],
            form=form,
            overhead=overhead,
            reference_batch_size=reference_batch_size,
        )
        for target in targets
    }


def curve_of_fits(fits: dict[float, TradeoffFit]) -> pd.DataFrame:
    """Write the fits of `fit_targets` as a table.

    Returns
    -------
    DataFrame
        One row a target: `target_loss`, `form`, for each of `critical_batch_size`,
        `overhead_batch_size`, `s_min`, `e_min` and `exponent` its value (missing where it is not
        identified), `_low` and `_high`; the same of the critical batch size by the `other_form`
        as `other_critical_batch_size`; `n_seeds`, `n_batches`, `batches_left_out`,
        `lack_of_fit_p`, `aicc`, `aicc_delta` (from the best form), `identified`, `note`, `runs`
        (their ids, where the table has them). The fits share runs, so that their errors go
        together.
    """
    rows = []
    for target, fit in fits.items():
        row: dict[str, object] = {"target_loss": target, "form": fit.form}
        estimates = {name: getattr(fit, name) for name in _ESTIMATES}
        estimates["e_min"] = fit.fewest_samples
        other = fit.fit_other()
        row["other_form"] = other.form
        estimates["other_critical_batch_size"] = other.critical_batch_size
        for name, estimate in estimates.items():
            row[name] = estimate.value
            row[f"{name}_low"], row[f"{name}_high"] = estimate.low, estimate.high
        row |= {
            "n_seeds": fit.n_seeds,
            "n_batches": len(fit.batches),
            "batches_left_out": len(fit.excluded),
            "lack_of_fit_p": fit.lack_of_fit_p,
            "aicc": fit.aicc,
            "aicc_delta": fit.forms["delta"].get(fit.form) if "delta" in fit.forms else None,
            "identified": fit.is_identified,
            "note": fit.critical_batch_size.note,
            "runs": run_names(fit.runs),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def run_names(runs: pd.DataFrame) -> str:
    """Join the ids of runs, where the table has them."""
    name = next((column for column in ("run_id", "run") if column in runs.columns), None)
    return "" if name is None else " ".join(map(str, runs[name]))
