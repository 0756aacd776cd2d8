"""Targets chosen from the curves: losses that every batch size reached, from easy to hard.

The rule, for each group of runs:

* Each global batch counts at the learning rate with the lowest worst-seed loss. A batch that lost
  a seed at every learning rate (it diverged, or measured nothing) is left out, and named.
* The hardest target is the highest last loss of the runs that count: all of them reach it for
  good. Where runs were stopped at a target of their own, that one is used if all reached it.
* It is raised until it is settled: at most a tenth of the runs first met it more than 10 % earlier
  than for good. Below that a crossing shows where the noise or the budget ends, not how fast a
  loss was reached. If no loss of the range is settled the hardest stays, with a note.
* The easiest is the lowest over these runs of the highest loss after their first two measurements,
  so that every crossing is bracketed by measurements during the training.
* Targets between are spaced evenly in loss; all are rounded up to digits that a reader can quote,
  so that none is harder than what was measured. Nothing is extrapolated.
* Groups share their targets where that costs none of them more than half of its own range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.joins import column_of
from batchscape.analysis.labels import group_name
from batchscape.analysis.targets.ends import crossing_rows, find_run_rows, last_losses, steps_at
from batchscape.analysis.targets.tidy import tidy_curves
from batchscape.errors import AnalysisError
from batchscape.text import count_text, list_text

EARLIER = 0.1
"""A run that first met a target by more than this share of its steps before it met it for good
met it early."""

MOST_EARLY = 0.1
"""Share of runs that may meet a target early; beyond it the target is not settled."""

N_TARGETS = 5
"""Targets of a group by default."""

_MOST_DECIMALS = 12

_PLACES = 40
"""Losses between the hardest and the easiest at which a settled one is looked for."""


@dataclass(frozen=True)
class ChosenTargets:
    """Targets by group, with notes on batches and targets that were left out."""

    by_group: dict[int, tuple[float, ...]]
    """Losses by group, from easy to hard; a group that reaches nothing in common has none."""
    notes: tuple[str, ...]
    """One sentence for each batch or target that was left out."""


class _LossRange(NamedTuple):
    easiest: float
    hardest: float
    stop: float
    """Target at which the runs were stopped; NaN where they were not."""


def choose_targets(
    curves: pd.DataFrame, n: int = N_TARGETS, groups: Mapping[int, str] | None = None
) -> ChosenTargets:
    """Choose targets that every batch size reached with all of its seeds.

    Parameters
    ----------
    curves : DataFrame
        One row a measurement, as `curves_of` or `read_table` returns it.
    n : int
        Targets of each group at most.
    groups : mapping of int to str, optional
        Labels of the groups.

    Raises
    ------
    AnalysisError
        If no group has a target.
    """
    curves = tidy_curves(curves)
    finals = last_losses(curves)
    ranges: dict[int, _LossRange] = {}
    notes: list[str] = []
    several = finals["group"].nunique() > 1
    for group, runs in finals.groupby("group", sort=True):
        where = f" for {group_name(groups, group)}" if several else ""
        best_run_numbers, reason_by_batch = _best_runs(runs)
        notes += [
            f"no target is set by global batch {batch}{where}: {why}"
            for batch, why in reason_by_batch.items()
        ]
        if best_run_numbers:
            losses = _range(runs[runs["run"].isin(best_run_numbers)])
            best_curves = curves[curves["run"].isin(best_run_numbers)]
            ranges[int(str(group))], unsettled = _settled(losses, best_curves, n)
            notes += [f"{unsettled}{where}"] if unsettled else []
        else:
            notes.append(f"no target can be chosen{where}")
    if not ranges:
        lines = ["no target was reached by all seeds of any global batch:", *notes]
        raise AnalysisError("\n  ".join([*lines, "give targets, such as the loss of a good run"]))
    easiest, hardest, stops = zip(*ranges.values(), strict=True)
    stop = stops[0] if len({*stops}) == 1 else np.nan
    common = _LossRange(min(easiest), max(hardest), stop)
    shared = all(_span(common) >= 0.5 * _span(r) for r in ranges.values())
    chosen = {g: _spaced(common if shared else r, n) for g, r in ranges.items()}
    return ChosenTargets(
        {int(g): chosen.get(g, ()) for g in finals["group"].unique()}, tuple(notes)
    )


def early_crossings(reaches: pd.DataFrame) -> tuple[int, int]:
    """Count the runs that first met their target early, and the runs that reached it."""
    steps = reaches["steps_to_target"].astype(float)
    first = reaches.get("first_steps_to_target", steps).astype(float)
    return int((first < (1 - EARLIER) * steps).sum()), int(np.isfinite(steps).sum())


def why_unsettled(reaches: pd.DataFrame) -> str | None:
    """Say why a target is not settled: more than `MOST_EARLY` of its runs met it early."""
    early, reached = early_crossings(reaches)
    if early <= MOST_EARLY * reached:
        return None
    return (
        f"{early} of {reached} runs first met it more than {EARLIER * 100:g} % earlier than for "
        f"good, and {MOST_EARLY * 100:g} % of runs at most may"
    )


def _settled(losses: _LossRange, curves: pd.DataFrame, n: int) -> tuple[_LossRange, str | None]:
    """Raise the hardest target until it is settled; return a note on one that was passed over."""
    if losses.stop >= losses.hardest or not losses.easiest > losses.hardest:
        return losses, None
    first_reason = None
    for place in np.linspace(losses.hardest, losses.easiest, _PLACES, endpoint=False).tolist():
        settled = losses._replace(hardest=place)
        # As it will be quoted: rounding may put a target where another loss is crossed.
        reason = why_unsettled(_both_crossings(curves, _spaced(settled, n)[-1]))
        if reason is None:
            note = (
                f"no target is set below {place:.4g}: at {losses.hardest:.4g}, which all reached, "
            )
            return settled, first_reason and note + first_reason
        first_reason = first_reason or reason
    note = f"no target that all runs reached is settled: at {losses.hardest:.4g} {first_reason}"
    return losses, note


def _both_crossings(curves: pd.DataFrame, target: float) -> pd.DataFrame:
    """Return the steps of both crossings of each run."""
    runs = find_run_rows(curves)
    loss = curves["loss"].to_numpy(dtype=float)
    first, sustained, _ = crossing_rows((loss <= target) & (loss > -np.inf), runs)
    steps = {"first_steps_to_target": first, "steps_to_target": sustained}
    return pd.DataFrame({name: steps_at(curves, row, runs, target) for name, row in steps.items()})


def _best_runs(runs: pd.DataFrame) -> tuple[list[int], dict[object, str]]:
    """Choose the runs at each batch's best learning rate; say why batches have none."""
    rates = column_of(runs, "learning_rate").fillna(0.0)
    runs = runs.assign(rate=rates, worst=runs["final_loss"].fillna(np.inf))
    best_run_numbers: list[int] = []
    reason_by_batch: dict[object, str] = {}
    for batch, cell in runs.groupby("global_batch_size"):
        worst = cell.groupby("rate")["worst"].max()
        if np.isfinite(worst.min()):
            is_best = cell["rate"].eq(float(str(worst.idxmin())))
            best_run_numbers += cell["run"][is_best].tolist()
            continue
        losses = cell["final_loss"]
        kinds = {"diverged": losses.eq(np.inf), "measured no loss": losses.isna()}
        counts = [f"{lost.sum()} {what}" for what, lost in kinds.items() if lost.any()]
        where = "at every learning rate some run is lost: " if len(worst) > 1 else ""
        runs_text = f"of {count_text(len(cell), 'run')}, {list_text(counts, 'and')}"
        reason_by_batch[batch] = where + runs_text
    return best_run_numbers, reason_by_batch


def _range(runs: pd.DataFrame) -> _LossRange:
    stops = column_of(runs, "stop_target_loss").dropna().unique()
    is_stopped = column_of(runs, "stop_reason").eq("target").any() and len(stops) == 1
    stop = float(stops[0]) if is_stopped else np.nan
    return _LossRange(float(runs["settled_loss"].min()), float(runs["final_loss"].max()), stop)


def _span(losses: _LossRange) -> float:
    return max(losses.easiest - losses.hardest, 0.0)


def _spaced(losses: _LossRange, n: int) -> tuple[float, ...]:
    """Space targets evenly in loss, each rounded up; the hardest alone where there is no range."""
    is_stopped = losses.stop >= losses.hardest
    hardest = losses.stop if is_stopped else losses.hardest
    easiest = max(losses.easiest, hardest)
    step = (easiest - hardest) / max(n, 2)
    # Digits that tell targets apart at this spacing, with one to spare.
    spacing = step if step > 0 else max(abs(hardest), 1e-6) / 500
    decimals = min(math.ceil(-math.log10(spacing / 5)), _MOST_DECIMALS)
    rounded = [_ceil(hardest + i * step, decimals) for i in range(n)]
    if is_stopped:
        rounded[0] = hardest
    below = {target for target in rounded if target < easiest}
    return tuple(sorted(below or rounded[:1], reverse=True))


def _ceil(value: float, decimals: int) -> float:
    unit = 10.0**decimals
    rounded = round(math.ceil(value * unit) / unit, max(decimals, 0))
    return rounded if rounded >= value else math.nextafter(value, math.inf)
