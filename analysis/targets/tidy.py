"""Tables of curves and reaches: checked, completed, one row a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.joins import column_of
from batchscape.analysis.targets.curves import PROGRESS
from batchscape.analysis.targets.schema import check, with_defaults
from batchscape.errors import AnalysisError
from batchscape.text import list_text

_NEEDED = ("run", "global_batch_size", "loss")
_DEFAULTS: dict[str, Any] = {
    "group": 0,
    "seed": np.nan,
    "status": "completed",
    "tokens": np.nan,
    "train_time_s": np.nan,
}
_TRAINING = ("group", "trajectory_id", "global_batch_size", "program_cut", "target_loss")


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
    curves = check(curves, "a table of curves", _NEEDED, [*PROGRESS]).reset_index(drop=True)
    if not {"optimizer_step", "samples"} & set(curves):
        names = list_text(map(str, curves.columns), "and")
        raise AnalysisError(
            "a table of curves needs optimizer_step or samples: how far a run was at each loss; "
            f"it has {names}"
        )
    batch = curves["global_batch_size"]
    if "optimizer_step" not in curves:
        curves["optimizer_step"] = curves["samples"] / batch
    curves = with_defaults(curves, {"samples": curves["optimizer_step"] * batch, **_DEFAULTS})
    settings = [*curves.filter(["group", "global_batch_size", "seed", "learning_rate"]).columns]
    distinct = curves[["run", *settings]].drop_duplicates()
    is_other = distinct["run"].duplicated()
    if is_other.any():
        run = distinct["run"][is_other].iloc[0]
        counts = distinct.loc[distinct["run"].eq(run), settings].nunique()
        varying = ", ".join(counts.index[counts > 1])
        raise AnalysisError(
            f"a run has one value of each setting; run {run} has several of {varying}"
        )
    begins = curves["run"].ne(curves["run"].shift())
    is_later = curves["optimizer_step"].diff().gt(0)
    if curves["run"][begins].is_unique and (begins | is_later).all():
        return curves
    curves = curves.sort_values(["run", "optimizer_step"], kind="stable", ignore_index=True)
    is_repeat = curves.duplicated(["run", "optimizer_step"])
    if is_repeat.any():
        row = curves[is_repeat].iloc[0]
        raise AnalysisError(
            "a run has one loss at an optimizer step; run "
            f"{row['run']} has several at step {row['optimizer_step']:g} "
            f"({is_repeat.sum()} rows too many); name runs apart by the column `run`"
        )
    return curves


def distinct_trajectories(reaches: pd.DataFrame) -> pd.DataFrame:
    """Keep one run of each trajectory, of programs of each cut too.

    Completed ones go first; of programs, diverged ones before them.
    """
    if "trajectory_id" not in reaches:
        return reaches
    keys = [*reaches.filter(_TRAINING).columns]
    status, cut = column_of(reaches, "status"), column_of(reaches, "program_cut")
    # Repeats of a program need not be equal: one that reached must not hide one that diverged.
    rank = status.ne("completed").astype(int).mask(cut.notna() & status.eq("diverged"), -1)
    order = np.argsort(rank.to_numpy(), kind="stable")
    ranked = reaches.iloc[order]
    is_repeat = (ranked.duplicated(keys) & ranked["trajectory_id"].notna()).to_numpy()
    return reaches.iloc[np.sort(order[~is_repeat])]


def at_common_target(
    reaches: pd.DataFrame, runs: pd.DataFrame, by: Sequence[str] = ()
) -> pd.DataFrame:
    """Keep the rows at the lowest target that all of `runs` (with equal `by`) reached."""
    keys = ["sweep_dir", "run_id"]
    number = runs.groupby([*by], dropna=False).ngroup() if by else 0
    head = runs[keys].assign(number=number)
    merged = reaches.merge(head, on=keys)
    number, target = merged.pop("number"), merged["target_loss"]
    reached = merged["outcome"].eq("reached").groupby([number, target])
    n_runs = number.map(head["number"].value_counts())
    is_common = reached.transform("all") & reached.transform("size").eq(n_runs)
    lowest = target.where(is_common).groupby(number).transform("min")
    return merged[target.eq(lowest)].reset_index(drop=True)
