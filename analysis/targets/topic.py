"""The report's section on targets: which runs reached them, with warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.joins import column_of
from batchscape.analysis.labels import group_name
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.targets.choice import early_crossings
from batchscape.analysis.targets.ends import TO_TARGET
from batchscape.analysis.targets.schema import OUTCOMES
from batchscape.analysis.targets.summary import reaches_table, tidy_reaches
from batchscape.analysis.targets.tidy import distinct_trajectories
from batchscape.text import list_text

_CROSSINGS = {
    "sustained": "A target is reached at the sustained crossing: from there on every measured loss "
    "is at or below it.",
    "first": "A target is reached at the first crossing: the loss may go back above it later.",
    "first_evaluation": "A target is reached at the first evaluation that met it, without "
    "interpolation, whatever became of the run later.",
}
_BATCH = "global_batch_size"
_COARSE = 0.25
"""A bracket wider than this share of the effect makes a warning."""


def targets_section(
    reaches: pd.DataFrame,
    *,
    groups: Mapping[int, str] | None = None,
    notes: Sequence[str] = (),
    quantity: str = "held-out loss",
    schedules: Sequence[str] = (),
) -> Section | None:
    """Say what it took to reach each target; warn of a `schedules` entry that decays."""
    if reaches.empty:
        return None
    table = reaches_table(reaches)
    counted = distinct_trajectories(tidy_reaches(reaches))
    return Section(
        title="Targets",
        answer=[*_answers(table, counted, groups or {}, quantity), *notes],
        tables=[reaches_shown(table, groups)],
        warnings=list(_warnings(counted, table, groups, schedules)),
    )


def reaches_shown(table: pd.DataFrame, groups: Mapping[int, str] | None = None) -> Table:
    """Choose the columns of `reaches_table` to show."""
    several, n_reached = table["group"].nunique() > 1, table["n_reached"]
    labels = [group_name(groups, g) if several else "" for g in table["group"]]
    columns = [
        Column("group", texts=labels, is_left=True),
        Column("target_loss", format=".7g", missing="", is_left=True),
        Column(_BATCH, "global batch", format=".0f", is_left=True),
        Column("program_cut", "cut", is_left=True),
        Column("learning_rate", format=3),
        Column(
            "n_reached", "reached", texts=n_reached.astype(str) + " of " + table["n"].astype(str)
        ),
    ]
    for name in TO_TARGET:
        has_figure = table[name].notna() | table[f"{name}_low"].gt(0)
        if name == "steps_to_target" or (has_figure & n_reached.gt(0)).any():
            header = name.replace("_", " ").replace(" s", " (s)") if name.endswith("_s") else ""
            columns.append(Column(name, header, low=f"{name}_low", high=f"{name}_high"))
    # What became of the runs that did not reach, row by row.
    missed = [
        ", ".join(f"{row[f'n_{name}']} {name}" for name in OUTCOMES[1:] if row[f"n_{name}"])
        for row in table.to_dict("records")
    ]
    crossings = column_of(table, "crossing").unique()
    notes = {
        "Geometric mean over runs, by which learning rates are chosen; in brackets the "
        f"{LEVEL:.0%} t-interval of the mean logarithm.": True,
        "Where a run did not reach: the median, a run that diverged counting as "
        f"infinite; in brackets its {LEVEL:.0%} interval from order statistics, where "
        "there are runs enough for one (6).": any(missed),
        "Times depend on the cut: a row with several cuts has none here, and the table of "
        "geometries has them by cut.": columns[-1].name == "time_to_target_s",
        **{text: name in crossings for name, text in _CROSSINGS.items()},
    }
    return Table(
        "targets",
        "Steps to target",
        table,
        [column for column in columns if column.name in table],
        footnotes=[[f"median; {of}, of the runs in this row" if of else None for of in missed]],
        notes=[note for note, is_shown in notes.items() if is_shown],
    )


def _answers(
    table: pd.DataFrame, reaches: pd.DataFrame, groups: Mapping[int, str], quantity: str
) -> Iterator[str]:
    counts = reaches["outcome"].value_counts()
    for group, part in table.groupby("group"):
        name = groups.get(int(str(group)), "")
        where = f" ({name})" if name else ""
        # Without a loss there is one target.
        lowest = part["target_loss"].min()
        is_known = not np.isnan(lowest)
        hardest = part[part["target_loss"].eq(lowest)] if is_known else part
        target = f"a {quantity} of {lowest:.7g}" if is_known else "the target"
        with_steps = hardest.dropna(subset=["steps_to_target", "samples_to_target"])
        with_steps = with_steps[np.isfinite(with_steps["steps_to_target"])]
        if with_steps.empty:
            yield f"No global batch{where} reached {target} with half of its runs."
            continue
        yield _what_it_took(
            with_steps, f"{target}{where}", is_only_batch=part[_BATCH].nunique() == 1
        )
    missed = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES[1:] if name in counts)
    if missed:
        yield (
            f"Of {len(reaches)} pairs of run and target, {counts.get('reached', 0)} were reached; "
            f"{missed}. All of them stay in the denominators."
        )


def _what_it_took(rows: pd.DataFrame, target: str, *, is_only_batch: bool) -> str:
    """Say what reaching a target took; `is_only_batch`: there is one global batch."""
    fewest = {name: rows.nsmallest(1, name).iloc[0] for name in [*TO_TARGET][:2]}
    (of_steps, steps), (of_samples, samples) = (
        (int(row[_BATCH]), significant(row[name], 3)) for name, row in fewest.items()
    )
    statistics = list_text(dict.fromkeys(f"{row['statistic']}s" for row in fewest.values()), "and")
    if rows[_BATCH].nunique() == 1:
        which = "a" if is_only_batch else "only a"
        does = "takes" if is_only_batch else "gets there with half of its runs; it takes"
        several = column_of(rows, "learning_rate").nunique() > 1
        rate = " at the best of its learning rates" if several else ""
        text = (
            f"{which} global batch of {of_steps} {does} {steps} optimizer steps and {samples} "
            f"samples{rate}"
        )
    else:
        text = (
            f"the fewest optimizer steps are taken by a global batch of {of_steps} ({steps} "
            f"steps), the fewest samples by one of {of_samples} ({samples} samples)"
        )
    return f"To reach {target}, {text}: {statistics} over runs."


def _warnings(
    reaches: pd.DataFrame,
    table: pd.DataFrame,
    groups: Mapping[int, str] | None,
    schedules: Sequence[str],
) -> Iterator[str]:
    reached = reaches[reaches["outcome"].eq("reached")]
    yield from _coarse(table, groups)
    early, n_reached = early_crossings(reaches)
    if early:
        yield (
            f"{early} of {n_reached} crossings were first met more than 10 % earlier than "
            "for good: the loss went back above the target in between"
        )
    is_for_good = ~column_of(reached, "crossing").isin(["first", "first_evaluation"])
    n_unconfirmed = column_of(reached, "confirmed_by").eq(0).sum()
    if n_unconfirmed and is_for_good.any():
        yield (
            f"{n_unconfirmed} of {n_reached} crossings are at a run's last measurement, as "
            "where it is stopped at its target: nothing later shows that they are for good"
        )
    if column_of(reaches, "averaged").eq(True).any():
        yield (
            "held-out losses are of averaged weights, which lag behind by about the half-life of "
            "the average; where that is not the same number of samples for all, batches differ "
            "by it"
        )
    decaying = sorted({*schedules} - {"constant"})
    if decaying:
        yield (
            f"the learning rate decays ({', '.join(decaying)}): a target met on the way is met "
            "later than by a run whose decay ended there, and by how much depends on the target"
        )


def _coarse(table: pd.DataFrame, groups: Mapping[int, str] | None) -> Iterator[str]:
    """Warn where the brackets of crossings are wide against the differences of batches."""
    for (group, target), cells in table.groupby(["group", "target_loss"], dropna=False):
        values = cells["samples_to_target"]
        logs = np.log(values[np.isfinite(values) & (values > 0)])
        spread, error = logs.max() - logs.min(), column_of(cells, "interpolation_error").max()
        if len(logs) > 1 and error > _COARSE * spread:
            where = f" for {group_name(groups, group)}" if table["group"].nunique() > 1 else ""
            yield (
                f"the evaluation grid is coarse{where} at {target:.7g}: a bracket is up to "
                f"±{error:.0%} wide, and the samples of global batches differ by "
                f"{np.expm1(spread):.0%}; interpolation is closer than that, but evaluate more "
                "often to rely on it"
            )
