"""Costs by learning rate, one row a trajectory, from a checked table of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import SEEDS
from batchscape.analysis.targets.columns import numbers_of
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
        If a column is missing, a value is not a number or out of its range, the table is empty,
        or one seed has two results at the same batch and learning rate.
    """
    needed = ("global_batch_size", "learning_rate", "seed", value)
    missing = [name for name in needed if name not in table]
    if missing:
        msg = (
            f"best learning rates need the columns {', '.join(needed)}; missing: "
            f"{', '.join(missing)}. The table has {', '.join(map(str, table.columns)) or 'none'}"
        )
        raise AnalysisError(msg)
    if table.empty:
        msg = "best learning rates need at least one run; the table has no rows"
        raise AnalysisError(msg)
    seeds = [name for name in SEEDS if name in table]
    costs = pd.DataFrame(
        {
            "group": table["group"].to_numpy() if "group" in table else 0,
            "target_loss": numbers_of(table, "target_loss") if "target_loss" in table else np.nan,
            "global_batch_size": _positive(table, "global_batch_size"),
            "learning_rate": _positive(table, "learning_rate"),
            "seed": _joined(table[seeds]),
            "row": np.arange(len(table)),
            "cost": _costs(table, value),
        }
    )
    costs = costs[has_result(table)]
    if costs.empty:
        msg = f"no run has a result: all of them ended as one of {', '.join(_WITHOUT_RESULT)}"
        raise AnalysisError(msg)
    keys = ["group", "target_loss", "global_batch_size", "learning_rate", "seed"]
    if "trajectory_id" in table:
        # Decompositions and timing repeats of one trajectory are no further draws of its noise.
        trajectories = table["trajectory_id"].to_numpy()[costs["row"]]
        repeats = costs.assign(trajectory=trajectories).duplicated([*keys, "trajectory"])
        costs = costs[~repeats | pd.isna(trajectories)]
    twice = costs[costs.duplicated(keys, keep=False)]
    if len(twice):
        first = twice.iloc[0]
        msg = (
            "one seed has one result at a global batch and learning rate; there are "
            f"{len(twice)} rows that repeat, the first with global_batch_size="
            f"{first['global_batch_size']:g}, learning_rate={first['learning_rate']:g}, seed="
            f"{first['seed']}. Tell different experiments apart by a column `group`, and name "
            "repeats of one trajectory by `trajectory_id`"
        )
        raise AnalysisError(msg)
    return costs


def series_of(costs: pd.DataFrame) -> Iterator[tuple[dict[str, object], pd.DataFrame]]:
    """Yield each series of a cost table behind its group and target, in order."""
    for values, rows in costs.groupby(list(SERIES), dropna=False):
        yield dict(zip(SERIES, values, strict=True)), rows


def with_runs(optima: pd.DataFrame, runs: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Add the runs behind each optimum: those that agree with it in the keys that they have."""
    if "run_id" not in runs:
        return optima
    keys = [name for name in keys if name in runs]
    plurals = {"run_id": "run_ids", "sweep_dir": "sweep_dirs"}
    by_optimum = runs.groupby(keys, dropna=False)[[name for name in plurals if name in runs]]

    def each(names: pd.Series[str]) -> str:
        return ";".join(sorted(set(names)))

    behind = by_optimum.agg(each)
    return optima.merge(behind.rename(columns=plurals).reset_index(), on=keys, how="left")


def _joined(seeds: pd.DataFrame) -> NDArray[np.object_]:
    """Write the seeds of each row as one text; thousands of rows share a few combinations."""
    codes = seeds.groupby(list(seeds), dropna=False, sort=False).ngroup().to_numpy()
    _, firsts = np.unique(codes, return_index=True)
    texts = seeds.iloc[firsts].astype(str).agg("/".join, axis=1).to_numpy(dtype=object)
    return np.asarray(texts[codes])


def has_result(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Tell which runs have a result: those whose status is not one of `_WITHOUT_RESULT`."""
    if "status" not in table:
        return np.ones(len(table), dtype=bool)
    return ~table["status"].isin(_WITHOUT_RESULT).to_numpy(dtype=bool)


def _costs(table: pd.DataFrame, value: str) -> NDArray[np.float64]:
    values = numbers_of(table, value)
    lost = np.isnan(values) | np.isposinf(values)
    for name in ("status", "outcome"):
        if name in table:
            lost |= table[name].isin(_LOSSES).to_numpy()
    if value == "steps_to_target":
        if (values[~lost] <= 0).any():
            msg = (
                "steps_to_target must be above 0, or missing where the target was not reached; got "
                f"{np.nanmin(values):g}"
            )
            raise AnalysisError(msg)
        values = np.log(np.where(lost, 1.0, values))
    elif np.isneginf(values).any():
        msg = f"{value} must not be -inf"
        raise AnalysisError(msg)
    return np.where(lost, np.inf, values)


def _positive(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    numbers = numbers_of(table, name)
    wrong = ~(np.isfinite(numbers) & (numbers > 0))
    if wrong.any():
        msg = f"{name} must be finite and above 0; got {numbers[wrong][0]} in {wrong.sum()} rows"
        raise AnalysisError(msg)
    return numbers
