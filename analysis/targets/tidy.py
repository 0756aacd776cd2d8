"""Tables of curves and reaches: checked, completed, one row a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.targets.schema import check
from batchscape.errors import AnalysisError
from batchscape.text import list_text

_NEEDED = ("run", "global_batch_size", "loss")
_PROGRESS = ("optimizer_step", "samples")
_OTHERS = (*_PROGRESS, "tokens", "train_time_s")
_DEFAULTS: dict[str, Any] = {
    "group": 0,
    "seed": np.nan,
    "status": "completed",
    "tokens": np.nan,
    "train_time_s": np.nan,
}
_IDENTIFYING = ("group", "global_batch_size", "seed", "learning_rate")


def tidy_curves(curves: pd.DataFrame) -> pd.DataFrame:
    """Check curves and add the columns that follow from others.

    Parameters
    ----------
    curves : DataFrame
        With `run`, `global_batch_size`, `loss`, and `optimizer_step` or `samples`.

    Returns
    -------
    DataFrame
        The same rows with a fresh index and every column that analysis reads: `group` is 0,
        `seed` NaN, `status` "completed", tokens and times NaN where they are not known. Rows
        of a run lie together, in order.

    Raises
    ------
    AnalysisError
        As `check` does, or if progress is not known, a setting of a run changes, or a measurement
        is there twice.
    """
    curves = check(curves, "a table of curves", _NEEDED, _OTHERS).reset_index(drop=True)
    if not {*_PROGRESS} & set(curves):
        names = list_text(map(str, curves.columns), "and")
        msg = (
            "a table of curves needs optimizer_step or samples: how far a run was at each loss; "
            f"it has {names}"
        )
        raise AnalysisError(msg)
    batch = curves["global_batch_size"]
    if "optimizer_step" not in curves:
        curves["optimizer_step"] = curves["samples"] / batch
    elif "samples" not in curves:
        curves["samples"] = curves["optimizer_step"] * batch
    unknown = {name: value for name, value in _DEFAULTS.items() if name not in curves}
    curves = curves.assign(**unknown)
    _refuse_several_settings(curves)
    step = curves["optimizer_step"].to_numpy(dtype=float)
    is_same_run = _same_run(curves)
    if (
        curves.loc[~is_same_run, "run"].is_unique
        and (np.diff(step, prepend=-1.0)[is_same_run] > 0).all()
    ):
        return curves
    curves = curves.sort_values(["run", "optimizer_step"], kind="stable", ignore_index=True)
    is_repeat = curves.duplicated(["run", "optimizer_step"])
    if is_repeat.any():
        row = curves[is_repeat].iloc[0]
        msg = (
            "a run has one loss at an optimizer step; run "
            f"{row['run']} has several at step {row['optimizer_step']:g} "
            f"({is_repeat.sum()} rows too many); name runs apart by the column `run`"
        )
        raise AnalysisError(msg)
    return curves


def distinct_trajectories(reaches: pd.DataFrame) -> pd.DataFrame:
    """Keep one run of each trajectory, of programs of each cut too.

    Completed ones go first; of programs, diverged ones before them.
    """
    if "trajectory_id" not in reaches:
        return reaches
    names = ("group", "trajectory_id", "global_batch_size", "program_cut", "target_loss")
    keys = [name for name in names if name in reaches]
    status = reaches.get("status", pd.Series("completed", reaches.index))
    cuts = reaches.reindex(columns=["program_cut"])["program_cut"].notna()
    # Repeats of a program need not be equal: one that reached must not hide one that diverged.
    rank = status.ne("completed").astype(int).mask(cuts & status.eq("diverged"), -1)
    order = np.argsort(rank.to_numpy(), kind="stable")
    ranked = reaches.iloc[order]
    is_repeat = (ranked.duplicated(keys) & ranked["trajectory_id"].notna()).to_numpy()
    return reaches.iloc[np.sort(order[~is_repeat])]


def at_common_target(
    reaches: pd.DataFrame, runs: pd.DataFrame, by: Sequence[str] = ()
) -> pd.DataFrame:
    """Keep the rows at the lowest target that all of `runs` (with equal `by`) reached."""
    keys = ["sweep_dir", "run_id"]
    group_number = runs.groupby(list(by), dropna=False).ngroup() if by else 0
    head = runs[keys].assign(group_number=group_number)
    merged = reaches.merge(head, on=keys)
    by_target = (
        merged["outcome"].eq("reached").groupby([merged["group_number"], merged["target_loss"]])
    )
    reached = by_target.agg(["all", "size"]).reset_index()
    everywhere = reached["all"] & reached["size"].eq(
        reached["group_number"].map(head["group_number"].value_counts())
    )
    lowest = reached[everywhere].groupby("group_number")["target_loss"].min()
    at_lowest = merged["target_loss"].eq(merged["group_number"].map(lowest))
    return merged[at_lowest].drop(columns="group_number").reset_index(drop=True)


def _refuse_several_settings(curves: pd.DataFrame) -> None:
    """Refuse a run whose settings change on the way."""
    names = [name for name in _IDENTIFYING if name in curves]
    # Only rows that differ from the one before can bring something new, and those are few.
    is_repeated = _same_run(curves)
    for name in names:
        column = curves[name]
        repeated = column.eq(column.shift()) | (column.isna() & column.shift().isna())
        is_repeated = is_repeated & repeated.to_numpy(dtype=bool)
    distinct = curves.loc[~is_repeated, ["run", *names]].drop_duplicates()
    twice = distinct["run"].duplicated()
    if twice.any():
        run = distinct["run"][twice].iloc[0]
        varying = [n for n in names if distinct.loc[distinct["run"].eq(run), n].nunique() > 1]
        msg = f"a run has one value of each setting; run {run} has several of {', '.join(varying)}"
        raise AnalysisError(msg)


def _same_run(curves: pd.DataFrame) -> NDArray[np.bool_]:
    """Tell which rows are of the run of the row before."""
    is_same_run: NDArray[np.bool_] = curves["run"].eq(curves["run"].shift()).to_numpy(dtype=bool)
    return is_same_run
