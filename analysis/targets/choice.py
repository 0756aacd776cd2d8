"""Targets chosen from the curves: what every batch size reached, from easy to hard.

The rule, for each group of runs:

* Of each global batch, the learning rate counts whose worst seed ended lowest. A batch of which
  every learning rate lost a seed (diverged, or without a measurement) is left out, and named.
* The hardest target is the highest last loss of the runs that count: all of them reach it for
  good. Where runs were stopped at a target of their own, that one is used if all reached it.
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

import numpy as np
import pandas as pd

from batchscape.analysis.labels import group_name
from batchscape.analysis.targets.ends import last_losses
from batchscape.analysis.targets.tidy import tidy_curves
from batchscape.errors import AnalysisError

__all__ = ["N_TARGETS", "ChosenTargets", "choose_targets"]

N_TARGETS = 5
"""Targets of a group, unless told otherwise."""

_MOST_DECIMALS = 12


@dataclass(frozen=True)
class ChosenTargets:
    """Targets, and what was decided on the way."""

    by_group: dict[int, tuple[float, ...]]
    """Losses by group, from easy to hard; a group that reaches nothing in common has none."""
    notes: tuple[str, ...]
    """What was left out and why."""


@dataclass(frozen=True)
class _Range:
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
        If no group has a target, or `n` is below 1.
    """
    if n < 1:
        msg = f"at least one target must be chosen, got n={n}"
        raise AnalysisError(msg)
    finals = last_losses(tidy_curves(curves))
    ranges: dict[int, _Range] = {}
    notes: list[str] = []
    several = finals["group"].nunique() > 1
    for group, runs in finals.groupby("group", sort=True):
        where = f" for {group_name(groups, group)}" if several else ""
        counted, left_out = _best_runs(runs)
        notes += [
            f"no target is set by global batch {batch}{where}: {why}" for batch, why in left_out
        ]
        if len(counted):
            ranges[int(str(group))] = _range(counted)
        else:
            notes.append(f"no target can be chosen{where}")
    if not ranges:
        lines = ["no target was reached by all seeds of any global batch:", *notes]
        raise AnalysisError("\n  ".join([*lines, "give targets, such as the loss of a good run"]))
    common = _Range(
        min(r.easiest for r in ranges.values()),
        max(r.hardest for r in ranges.values()),
        np.nan if len({r.stop for r in ranges.values()}) > 1 else next(iter(ranges.values())).stop,
    )
    shared = all(_span(common) >= 0.5 * _span(r) for r in ranges.values())
    chosen = {g: _spaced(common if shared else r, n) for g, r in ranges.items()}
    return ChosenTargets(
        {int(g): chosen.get(g, ()) for g in finals["group"].unique()}, tuple(notes)
    )


def _best_runs(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[tuple[int, str]]]:
    """Keep the runs at each batch's best learning rate; name the batches without one."""
    rates = runs["learning_rate"] if "learning_rate" in runs else pd.Series(0.0, runs.index)
    runs = runs.assign(rate=rates.fillna(0.0), worst=runs["final_loss"].fillna(np.inf))
    kept, left_out = [], []
    for batch, cell in runs.groupby("global_batch_size"):
        worst = cell.groupby("rate")["worst"].max()
        best = cell[cell["rate"].eq(float(str(worst.idxmin())))]
        if np.isfinite(best["worst"]).all():
            kept.append(best)
            continue
        left_out.append((int(str(batch)), _why_none(cell)))
    return (pd.concat(kept) if kept else runs.iloc[:0]), left_out


def _why_none(cell: pd.DataFrame) -> str:
    """Say what became of the runs of a batch that lost one at every learning rate."""
    losses = cell["final_loss"]
    parts = [(losses.eq(np.inf), "diverged"), (losses.isna(), "measured no loss")]
    counts = [f"{int(which.sum())} {what}" for which, what in parts if which.any()]
    where = "at every learning rate some run is lost: " if cell["rate"].nunique() > 1 else ""
    return f"{where}of {len(cell)} run{'s' if len(cell) > 1 else ''}, {' and '.join(counts)}"


def _range(runs: pd.DataFrame) -> _Range:
    stop = np.nan
    if {"stop_target_loss", "stop_reason"} <= set(runs) and runs["stop_reason"].eq("target").any():
        found = runs["stop_target_loss"].dropna().unique()
        stop = float(found[0]) if len(found) == 1 else np.nan
    return _Range(float(runs["settled_loss"].min()), float(runs["final_loss"].max()), stop)


def _span(losses: _Range) -> float:
    return max(losses.easiest - losses.hardest, 0.0)


def _spaced(losses: _Range, n: int) -> tuple[float, ...]:
    """Space targets evenly in loss, each rounded up; the hardest alone where there is no range."""
    hardest = losses.stop if losses.stop >= losses.hardest else losses.hardest
    easiest = max(losses.easiest, hardest)
    step = (easiest - hardest) / max(n, 2)
    # Digits that tell targets apart at this spacing, with one to spare.
    spacing = step if step > 0 else max(abs(hardest), 1e-6) / 500
    decimals = min(math.ceil(-math.log10(spacing / 5)), _MOST_DECIMALS)
    rounded = [
        hardest if i == 0 and hardest == losses.stop else _ceil(hardest + i * step, decimals)
        for i in range(n)
    ]
    below = [t for t in dict.fromkeys(rounded) if t < easiest]
    return tuple(sorted(below or rounded[:1], reverse=True))


def _ceil(value: float, decimals: int) -> float:
    unit = 10.0**decimals
    rounded = round(math.ceil(value * unit) / unit, max(decimals, 0))
    return rounded if rounded >= value else math.nextafter(value, math.inf)
