"""When each run reached a target loss: steps, samples, tokens and time, or why there are none.

* **At or below.** A measurement meets a target if its loss is at most the target. NaN and infinite
  losses meet none.
* **First crossing**: the first measurement that meets the target. **Sustained crossing**: the first
  from which all later ones do as well; one on the last measurement counts, and `confirmed_by` says
  how many later ones bear a crossing out (none where the run was stopped at its target).
* **Interpolation** between that measurement and the one before: linear in the loss against the
  logarithm of samples (against samples where the earlier one has none), and from there linear in
  steps, tokens and time. It cannot be wrong by more than the bracket, `steps_low` to `steps_high`.
  Where the earlier loss is not finite, or the first measurement of all meets the target, nothing
  can be interpolated and the upper end is taken.
* **First evaluation**: the first measurement that meets the target, as it stands: not interpolated,
  and whatever became of the run later. So scores AlgoPerf (Dahl et al. 2023, arXiv:2306.07179;
  `get_index_that_reaches_target` in scoring/performance_profile.py of
  github.com/mlcommons/algorithmic-efficiency).
* **Not reached** is an outcome, not a number. A run that diverged, at whatever time, never reaches:
  its bracket is infinite. One that ended before (`censored`) or was cut by a rule (`pruned`) would
  have needed more than its last measured step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
import pandas as pd

from batchscape.analysis.targets.choice import ChosenTargets, choose_targets
from batchscape.analysis.targets.curves import IDENTITY
from batchscape.analysis.targets.ends import (
    TO_TARGET,
    Flags,
    Floats,
    RunRows,
    crossing_rows,
    diverged_runs,
    find_run_rows,
    progress_at,
    steps_at,
)
from batchscape.analysis.targets.tidy import tidy_curves
from batchscape.errors import AnalysisError

Crossing = Literal["sustained", "first", "first_evaluation"]

_SEEN_AT_END = {"tokens_low": "tokens", "time_low_s": "train_time_s"}
"""Columns of what a run without the target had seen in the end, and of its progress."""


def steps_to_target(
    curves: pd.DataFrame,
    targets: Sequence[float] | ChosenTargets | None = None,
    *,
    crossing: Crossing = "sustained",
) -> pd.DataFrame:
    """Find when each run reached each target.

    Parameters
    ----------
    curves : DataFrame
        One row a measurement, as `curves_of` or `read_table` returns it.
    targets : sequence of float or ChosenTargets, optional
        Losses; by default `choose_targets` chooses those of each group.
    crossing : {"sustained", "first", "first_evaluation"}
        Which crossing the values are of; at the first evaluation nothing is interpolated, and a
        run that diverges later has reached.

    Returns
    -------
    DataFrame
        One row a run and target, by falling target: what the run is (`IDENTITY`, as far as the
        curves have it), `target_loss`, `outcome` (one of `OUTCOMES`), `steps_to_target`,
        `samples_to_target`, `tokens_to_target`, `time_to_target_s` (NaN unless reached),
        `steps_low` and `steps_high` (the bracket), `tokens_low` and `time_low_s` (of a run that
        ended before it reached: what it had seen), `first_steps_to_target`, `crossing`,
        `interpolation_error` (half the bracket over the value) and `confirmed_by`.

    Raises
    ------
    AnalysisError
        If the table lacks columns or contradicts itself, a target is not a finite number, or
        one was met before the training began.
    """
    if crossing not in get_args(Crossing):
        raise AnalysisError(f"crossing is one of {', '.join(get_args(Crossing))}, got {crossing!r}")
    curves = tidy_curves(curves)
    targets_by_group: Mapping[int, Sequence[float]]
    if targets is None or isinstance(targets, ChosenTargets):
        targets_by_group = (targets or choose_targets(curves)).by_group
    elif not len(targets) or not np.isfinite(np.asarray(targets, dtype=float)).all():
        raise AnalysisError(f"targets are finite losses, one at least, got {list(targets)}")
    else:
        targets = [float(target) for target in targets]
        targets_by_group = dict.fromkeys(map(int, curves["group"].unique()), targets)
    runs = find_run_rows(curves)
    identity = curves.loc[runs.last, [name for name in IDENTITY if name in curves]]
    identity = identity.reset_index(drop=True)
    diverged = diverged_runs(curves, runs)
    parts = []
    for target in sorted({t for losses in targets_by_group.values() for t in losses}, reverse=True):
        groups = [group for group, losses in targets_by_group.items() if target in losses]
        is_in_group = identity["group"].isin(groups).to_numpy(dtype=bool)
        group_runs = RunRows(runs.start[is_in_group], runs.last[is_in_group])
        part = _reaches(curves, group_runs, diverged[is_in_group], target, crossing)
        parts.append(pd.concat([identity[is_in_group].reset_index(drop=True), part], axis=1))
    return pd.concat(parts, ignore_index=True)


def _reaches(
    curves: pd.DataFrame,
    runs: RunRows,
    diverged: Flags,
    target: float,
    crossing: Crossing,
) -> pd.DataFrame:
    loss = curves["loss"].to_numpy(dtype=float)
    step = curves["optimizer_step"].to_numpy(dtype=float)
    met = (loss <= target) & (loss > -np.inf)  # False for NaN
    first, sustained, confirmed = crossing_rows(met, runs)
    _refuse_met_at_start(loss, step, runs, met, target)
    crossing_row = sustained if crossing == "sustained" else first
    as_measured = crossing == "first_evaluation"
    diverged = diverged & ~((crossing_row <= runs.last) & as_measured)
    reached = (crossing_row <= runs.last) & ~diverged
    upper = np.where(reached, crossing_row, runs.last)
    # A run's first row has none before it to interpolate from.
    values = progress_at(curves, upper, (upper == runs.start) | as_measured, target)
    before = np.where(upper > runs.start, step[upper - 1], 0.0)
    pruned = curves["status"].iloc[runs.last].eq("pruned").to_numpy(dtype=bool)
    to_target = {name: np.where(reached, values[name], np.nan) for name in TO_TARGET}
    low = np.select([diverged, reached], [np.inf, before], step[runs.last])
    high = np.where(reached, step[upper], np.inf)
    with np.errstate(invalid="ignore"):
        error = (high - low) / 2 / to_target["steps_to_target"]
    kinds = [diverged, reached, pruned]
    return pd.DataFrame(
        {
            "target_loss": target,
            "outcome": np.select(kinds, ["diverged", "reached", "pruned"], "censored"),
            **to_target,
            "steps_low": low,
            "steps_high": high,
            **{
                name: np.where(reached | diverged, np.nan, curves[progress].iloc[runs.last])
                for name, progress in _SEEN_AT_END.items()
            },
            "first_steps_to_target": steps_at(curves, first, runs, target),
            "crossing": crossing,
            "interpolation_error": error,
            "confirmed_by": np.where(reached, confirmed["first" if as_measured else crossing], 0),
        }
    )


def _refuse_met_at_start(
    loss: Floats, step: Floats, runs: RunRows, met: Flags, target: float
) -> None:
    early = met[runs.start] & (step[runs.start] == 0)
    if early.any():
        lowest = loss[runs.start[early]].min()
        raise AnalysisError(
            f"a target is reached by training, and {target:g} was met before the first optimizer "
            f"step by {early.sum()} of {len(early)} runs, whose losses begin at {lowest:g} and on; "
            "give a lower target"
        )
