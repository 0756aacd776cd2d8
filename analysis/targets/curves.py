"""Loss curves as one long table, and the groups of runs that may be compared at equal targets.

A row is one measurement of one run. What a run is (its batch, seed, learning rate) is repeated in
each of its rows, so that the table needs no other beside it. Columns: `docs/analysis_tables.md`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells, follows, geometry_label
from batchscape.analysis.hardware import is_timed_alone, was_started
from batchscape.analysis.joins import column_of, rows_of
from batchscape.analysis.labels import group_labels
from batchscape.analysis.numbers import MISSING
from batchscape.errors import AnalysisError
from batchscape.record.tables import Tables

PROGRESS = {
    "optimizer_step": "optimizer steps",
    "samples": "samples",
    "tokens": "tokens",
    "train_time_s": "time in optimizer steps (s)",
}
"""Columns that say how far a run was at a measurement, and what they count."""

IDENTITY = (
    "run",
    "group",
    "global_batch_size",
    "seed",
    "learning_rate",
    "status",
    "stop_reason",
    "stop_target_loss",
    "averaged",
    "run_id",
    "sweep_dir",
    "cell",
    "trajectory_id",
    "program_cut",
)
"""Columns that say what a run is; equal in all of its rows. `program_cut` is the geometry of a
program of others, whose cuts are not known to train alike; missing for any other run."""

# Texts that repeat in millions of rows are stored once.
_TEXTS = ("status", "stop_reason", "run_id", "sweep_dir", "trajectory_id")
_LEARNING_RATE = ("learning_rate", "optimizer.learning_rate")
# Where a run ran decides its times, not its losses.
_WHERE_ONLY = ("hardware", "device_type", "nodes")
# These may be chosen batch by batch without making another experiment of it; a model may not.
_MAY_FOLLOW = ("optimizer.", "schedule.", "budget.", "evaluation.", "loader.")
_DATA = "data.manifest_hash"


def curves_of(cells: Cells, tables: Tables) -> pd.DataFrame:
    """Collect the curves of held-out loss of every run that was started.

    Parameters
    ----------
    cells : Cells
        As `find_cells` returns it.
    tables : Tables
        What its runs were loaded from.

    Returns
    -------
    DataFrame
        One row a measurement, in order: the columns of `IDENTITY` and `PROGRESS`, and `loss`.
        Times are NaN where the run's times are not valid, and tokens where samples have none. A
        run without any measurement has one row, at optimizer step 0, whose loss is NaN, so that it
        stays in every denominator.

    Raises
    ------
    AnalysisError
        If no run was trained in full, or none measured its held-out loss.
    """
    runs = cells.runs[was_started(cells.runs) & ~is_timed_alone(cells.runs)]
    if runs.empty:
        raise AnalysisError(
            f"no run was started: all {len(cells.runs)} are pending, rejected or only timed"
        )
    rows = rows_of(runs, tables.evals, [*PROGRESS, "eval_loss"])
    rows = rows.rename(columns={"eval_loss": "loss"})
    if rows["loss"].isna().all():
        raise AnalysisError(
            f"none of the {len(runs)} runs measured its held-out loss; set evaluation.every_samples"
        )
    silent = np.setdiff1d(np.arange(len(runs)), rows["run"])
    start = pd.DataFrame({"run": silent, "loss": np.nan, **dict.fromkeys(PROGRESS, 0.0)})
    # Of a step that was measured twice the last counts.
    place = ["run", "optimizer_step"]
    rows = pd.concat([rows, start]).sort_values(place, kind="stable", ignore_index=True)
    rows = only_what_counts(rows.drop_duplicates(place, keep="last", ignore_index=True), runs)
    identity = _identity(cells, runs).reindex(columns=[*IDENTITY])
    of_rows = identity.take(rows["run"].to_numpy()).reset_index(drop=True)
    return of_rows.join(rows[[*PROGRESS, "loss"]])


def only_what_counts(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Blank times of runs without valid times, and tokens where samples have none."""
    position = rows["run"].to_numpy()
    timed = runs["timing_valid"].to_numpy(dtype=bool)[position]
    # A sample of another task has no tokens, though it has a target.
    has_no_tokens = column_of(runs, "task").isin(["class", "other"]).to_numpy()[position]
    return rows.assign(
        tokens=rows["tokens"].mask(has_no_tokens), train_time_s=rows["train_time_s"].where(timed)
    )


def curve_groups(cells: Cells, across: Collection[str] = ()) -> pd.DataFrame:
    """Tell apart what must not be pooled at one target.

    Runs of one group agree in everything but global batch, geometry, seeds and learning rate, and
    in where they ran. These make no group: settings of optimizer, schedule, budget or evaluation
    that follow from the global batch (and learning rate), those in `across`, and what follows from
    these.

    Returns
    -------
    DataFrame
        One row a group, indexed by `group` from 0 in the order of the cells: `label` (empty for
        a single group), one text column a setting that tells groups apart, and `cells` (a tuple).
    """
    started = cells.runs.loc[was_started(cells.runs), "cell"].unique()
    table = cells.table.loc[np.sort(started)]
    varied = ["global_batch_size", *(n for n in (*_LEARNING_RATE, *across) if n in table)]
    names = [n for n in cells.settings if n not in {*_LEARNING_RATE, *_WHERE_ONLY, *across}]
    table[names] = table[names].astype(object).fillna(MISSING)
    # Names say most, and a hash least: the first that tells groups apart is what they are called.
    for name in sorted(names, key=lambda n: (n != _DATA, n.endswith(".name"))):
        other_settings = [setting for setting in names if setting != name]
        may_follow = name.startswith(_MAY_FOLLOW) and not name.endswith(".name")
        is_redundant = follows(table, other_settings, name)
        if is_redundant or (may_follow and follows(table, [*varied, *other_settings], name)):
            names = other_settings
    groups = {name.partition(".")[0] for name in names if not name.startswith(_MAY_FOLLOW)}
    # What varies with one of these is named beside it, as in the label of a cell.
    beside = [n for n in cells.key_settings if "." in n and n.partition(".")[0] in groups]
    beside = [n for n in beside if n in table and names and follows(table, names, n)]
    names = [n for n in cells.settings if n in {*names, *beside}]
    group = table.groupby(names or np.zeros(len(table)), sort=False).ngroup()
    members = [tuple(map(int, group.index[group.eq(number)])) for number in range(group.nunique())]
    group_table = table.assign(group=group).drop_duplicates("group").set_index("group")[names]
    group_table.insert(0, "label", group_labels(group_table))
    return group_table.assign(cells=pd.Series(members, index=group_table.index, dtype=object))


def _identity(cells: Cells, runs: pd.DataFrame) -> pd.DataFrame:
    members = curve_groups(cells)["cells"].explode()
    numbers = {
        "run": np.arange(len(runs)),
        "group": runs["cell"].map(pd.Series(members.index, index=members)),
        "global_batch_size": runs["global_batch_size"],
        "cell": runs["cell"],
    }
    columns: dict[str, Any] = {
        "seed": _numbers(runs, "seed"),
        "learning_rate": _numbers(runs, *_LEARNING_RATE),
        "stop_target_loss": _numbers(runs, "budget.target_loss"),
        "averaged": _numbers(runs, "evaluation.ema_half_life_tokens") > 0,
        **{name: pd.Categorical(runs[name].astype(object)) for name in runs.filter(_TEXTS).columns},
        "program_cut": pd.Categorical(
            runs["cell"].map(geometry_label(cells.table).where(cells.of_programs(), None))
        ),
    }
    return pd.DataFrame(numbers, index=runs.index, dtype=np.int64).assign(**columns)


def _numbers(runs: pd.DataFrame, *names: str) -> pd.Series[float]:
    """Take the first of some columns that is known, run by run."""
    columns = runs.reindex(columns=names).apply(pd.to_numeric, errors="coerce").astype(float)
    first: pd.Series[float] = columns.bfill(axis=1).iloc[:, 0]
    return first
