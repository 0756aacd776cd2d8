"""The cost that learning rates minimise: steps to a common target, else the final loss."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.hardware import is_timed_alone
from batchscape.analysis.joins import column_of
from batchscape.analysis.learning_rate.optimum import best_learning_rates

STEPS, LOSS = "steps_to_target", "final_eval_loss"
"""What may be minimised."""


class Optima(NamedTuple):
    """The best learning rate of every global batch, and what it was found from."""

    table: pd.DataFrame
    """One row a run."""
    value: str
    """Column of the table that was minimised: `STEPS` or `LOSS`."""
    best: pd.DataFrame
    """As `best_learning_rates` returns it; one target a group."""


def find_optima(
    reaches: pd.DataFrame,
    finals: pd.DataFrame | None = None,
    optima: pd.DataFrame | None = None,
) -> Optima | None:
    """Find the best learning rate of every global batch.

    Steps to the hardest target that some learning rate of every batch reached are minimised;
    where there is none, the final held-out loss.

    Parameters
    ----------
    reaches : DataFrame
        One row a run and target, with `learning_rate`; as for `best_learning_rates`.
    finals : DataFrame, optional
        One row a run of equal samples: `global_batch_size`, `learning_rate`, `seed`,
        `final_eval_loss`, and `group`, `status` where there are any.
    optima : DataFrame, optional
        `best_learning_rates` of `reaches`, where it is there already.

    Returns
    -------
    Optima or None
        None where no global batch was trained at two learning rates.

    Raises
    ------
    AnalysisError
        As `costs_by_rate` does.
    """
    if is_varied(reaches):
        rows = reaches.dropna(subset="learning_rate")
        best = best_learning_rates(rows, STEPS) if optima is None else optima
        # The hardest target that every batch reached: a warm-up alone reaches an easy one.
        worked = best["grid_learning_rate"].notna()
        target = best["target_loss"].fillna(-np.inf)
        is_reached = worked.groupby([best["group"], target]).transform("all")
        lowest = target.where(is_reached)
        hardest = lowest == lowest.groupby(best["group"]).transform("min")
        if hardest.any():
            best = best[hardest]
            keys = [*rows.filter(["group", "target_loss"]).columns]
            chosen = rows.merge(best[keys].drop_duplicates(), on=keys) if keys else rows
            return Optima(chosen, STEPS, best)
    if finals is not None and is_varied(finals):
        rows = finals.dropna(subset="learning_rate")
        return Optima(rows, LOSS, best_learning_rates(rows, LOSS))
    return None


def final_losses(runs: pd.DataFrame) -> pd.DataFrame:
    """Collect the final losses of runs that saw equal samples: none that stopped before."""
    stopped = column_of(runs, "stop_reason").eq("target") | is_timed_alone(runs)
    names = ["global_batch_size", "learning_rate", "seed", LOSS, "status"]
    return runs[~stopped].reindex(columns=[*names, "run_id", "sweep_dir", "trajectory_id"])


def is_varied(table: pd.DataFrame) -> bool:
    """Tell whether some global batch was trained at two learning rates."""
    keys = [*table.filter(["group", "global_batch_size"]).columns]
    if "global_batch_size" not in keys or "learning_rate" not in table:
        return False
    return bool(table.groupby(keys)["learning_rate"].nunique().gt(1).any())
