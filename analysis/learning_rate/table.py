"""Costs by learning rate, one row a trajectory, from a checked table of runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import SEEDS
from batchscape.analysis.joins import column_of
from batchscape.analysis.targets.schema import check, with_defaults
from batchscape.errors import AnalysisError

SERIES = ("group", "target_loss")
"""Columns that part a table into series with one curve of optima each; both may be lacking."""

# Runs of these statuses show nothing about their learning rate.
_WITHOUT_RESULT = ("failed", "interrupted", "oom", "pending", "rejected", "running", "timeout")
_LOSSES = ("diverged", "pruned")


def costs_by_rate(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Check a table and reduce it to what a search for the best learning rate needs.

    Parameters
    ----------
    table : DataFrame
        One row a run: `global_batch_size`, `learning_rate`, `seed` and the column `value`; where
        there are any, `group`, `target_loss`, `status`, `outcome`, `trajectory_id`, `init_seed`,
        `data_seed`.
    value : str
        `steps_to_target` (missing or infinite: not reached) or a loss such as `final_eval_loss`.

    Returns
    -------
    DataFrame
        One row a trajectory: `group` (0), `target_loss` (NaN), `global_batch_size`,
        `learning_rate`, `seed` (text), `row` (position in `table`) and `cost`, to be minimised:
        the logarithm of the steps, or the loss. Infinite where a run diverged, was cut as
        hopeless, or did not reach its target.

    Raises
    ------
    AnalysisError
        As `check` does, or if no run has a result, or one seed has two at the same batch and
        learning rate.
    """
    needed = ("global_batch_size", "learning_rate", "seed", value)
    table = check(table, "a table of runs", needed)
    keys = [*SERIES, "global_batch_size", "learning_rate", "seed"]
    costs = with_defaults(table.filter(keys), {"group": 0, "target_loss": np.nan})[keys]
    costs = costs.astype({"target_loss": float, "global_batch_size": float}).assign(
        seed=_joined(table.filter(SEEDS)), row=np.arange(len(table)), cost=_costs(table, value)
    )
    costs = costs[has_result(table)].reset_index(drop=True)
    if costs.empty:
        raise AnalysisError(
            f"no run has a result: all of them ended as one of {', '.join(_WITHOUT_RESULT)}"
        )
    # Decompositions and timing repeats of one trajectory are no further draws of its noise.
    trajectory = column_of(table, "trajectory_id").to_numpy()[costs["row"]]
    repeats = costs.assign(trajectory=trajectory).duplicated([*keys, "trajectory"])
    costs = costs[~repeats | pd.isna(trajectory)]
    twice = costs[costs.duplicated(keys, keep=False)]
    if len(twice):
        first = twice.iloc[0]
        raise AnalysisError(
            "one seed has one result at a global batch and learning rate; there are "
            f"{len(twice)} rows that repeat, the first with global_batch_size="
            f"{first['global_batch_size']:g}, learning_rate={first['learning_rate']:g}, seed="
            f"{first['seed']}. Tell different experiments apart by a column `group`, and name "
            "repeats of one trajectory by `trajectory_id`"
        )
    return costs


def with_runs(optima: pd.DataFrame, runs: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Add the runs behind each optimum: those that agree with it in the keys that they have."""
    if "run_id" not in runs:
        return optima
    plurals = {"run_id": "run_ids", "sweep_dir": "sweep_dirs"}
    by_optimum = runs.groupby([*runs.filter([*keys]).columns], dropna=False)[
        [*runs.filter([*plurals]).columns]
    ]

    def each(names: pd.Series[str]) -> str:
        return ";".join(sorted(set(names)))

    behind = by_optimum.agg(each).rename(columns=plurals).reset_index()
    return optima.merge(behind, how="left")


def _joined(seeds: pd.DataFrame) -> NDArray[np.object_]:
    """Write the seeds of each row as one text; thousands of rows share a few combinations."""
    codes = seeds.groupby(list(seeds), dropna=False, sort=False).ngroup().to_numpy()
    _, firsts = np.unique(codes, return_index=True)
    texts = seeds.iloc[firsts].astype(str).agg("/".join, axis=1).to_numpy(dtype=object)
    return np.asarray(texts[codes])


def has_result(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Tell which runs have a result: those whose status is not one of `_WITHOUT_RESULT`."""
    return ~column_of(table, "status").isin(_WITHOUT_RESULT).to_numpy(dtype=bool)


def _costs(table: pd.DataFrame, value: str) -> NDArray[np.float64]:
    values = table[value].to_numpy()
    lost = ~np.isfinite(values)
    for name in ("status", "outcome"):
        lost |= column_of(table, name).isin(_LOSSES).to_numpy()
    costs = np.log(np.where(lost, 1.0, values)) if value == "steps_to_target" else values
    return np.where(lost, np.inf, costs)
