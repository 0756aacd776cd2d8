"""The runs of each horizon, and those of the longest one alone."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, SEEDS, Cells, plain_texts
from batchscape.analysis.hardware import is_timed_alone
from batchscape.analysis.horizons.optima import NAMES
from batchscape.analysis.joins import column_of
from batchscape.analysis.learning_rate.aim import LOSS
from batchscape.analysis.targets.curves import curve_groups

_BUDGETS = ("budget.samples", "budget.tokens", "budget.optimizer_steps")
_COLUMNS = ("planned_samples", "schedule.name", "schedule.decay_samples", "stop_reason")


def runs_by_horizon(cells: Cells) -> tuple[pd.DataFrame, dict[int, str]]:
    """Return the runs that end with their budget, with `group` and `horizon`, and labels of groups.

    Groups pool runs of several budgets, where the schedule ends with them.
    """
    runs = cells.runs[~is_timed_alone(cells.runs)]
    groups = curve_groups(cells, across=_BUDGETS)
    members = groups["cells"].explode()
    group = runs["cell"].map(pd.Series(members.index, index=members))
    horizon, name, decay, stopped = (column_of(runs, column) for column in _COLUMNS)
    runs = runs.assign(group=group, horizon=horizon)
    ends = name.eq("wsd") | (name.eq("cosine") & decay.isna())
    several = runs.groupby("group")["horizon"].transform("nunique").gt(1)
    is_other = stopped.eq("target") | (several & ~ends)
    # A run that was not started has no group.
    is_kept = is_other.groupby(group).transform("any").eq(False)
    return runs[is_kept].astype({"group": int}), dict(groups["label"])


def without_shorter_horizons(cells: Cells, runs: pd.DataFrame) -> Cells:
    """Leave out shorter horizons of a training whose longest one has a grid of all their runs.

    `runs` are those of `runs_by_horizon`; one counts that has a final loss, diverged or ran out of
    memory. Of each cut that completed at a shorter horizon, one run completed at the longest. Cells
    keep their numbers.
    """
    cut = [*GEOMETRY, *(name for name in cells.cost_settings() if name not in _BUDGETS)]
    point = [*dict.fromkeys([*cut, *NAMES, *runs.filter(SEEDS).columns])]
    runs = runs.reindex(columns=[*dict.fromkeys([*runs.columns, *point, LOSS])])
    shorter: list[int] = []
    for _, rows in runs.groupby("group"):
        ended = rows[rows[LOSS].notna() | rows["status"].isin(["diverged", "oom"])]
        longest = ended["horizon"].max()
        at_longest = ended[ended["horizon"].eq(longest)]
        others = ended[ended["horizon"].lt(longest)]
        has_all = _values(at_longest, point) >= _values(others, point)
        completed = [part[part["status"].eq("completed")] for part in (at_longest, others)]
        has_all &= _values(completed[0], cut) >= _values(completed[1], cut)
        if has_all and at_longest[list(NAMES)].nunique().ge(3).all():
            shorter += rows.index[rows["horizon"].lt(longest)].tolist()
    return cells.without(shorter) if shorter else cells


def _values(runs: pd.DataFrame, names: list[str]) -> set[tuple[str, ...]]:
    """Return the distinct values of some columns; as texts, as a missing one equals no other."""
    return set(zip(*(plain_texts(runs[name]) for name in names), strict=True))
