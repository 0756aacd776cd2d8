"""Loss curves as tables: averaged over runs, thinned to what a figure can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells, counted, launched_batches
from batchscape.analysis.equivalence.decompositions import loss_differences, seed_spread
from batchscape.analysis.joins import rows_of
from batchscape.analysis.numbers import significant
from batchscape.text import list_text

__all__ = ["MAX_POINTS", "LossCurves", "diverged_curves", "loss_curves", "mean_curves", "with_room"]

MAX_POINTS = 200
"""Points of a curve; a longer one is averaged over windows of equal numbers of steps."""

_LEAST_POINTS, _POINTS_A_FIGURE = 40, 10_000
"""A figure of hundreds of curves has small panels: more points would be seen by nobody, and take
most of the time of drawing it."""

PROGRESS = ("optimizer_step", "samples", "train_time_s")
"""Columns that a loss is drawn against."""


@dataclass(frozen=True)
class LossCurves:
    """Everything that a figure of loss draws."""

    steps: pd.DataFrame
    """Training loss, as `mean_curves` returns it."""
    evals: pd.DataFrame
    """Held-out loss, likewise."""
    diverged: pd.DataFrame
    """Training loss of runs that diverged, as `diverged_curves` returns it."""
    differences: pd.DataFrame
    """`cell`, `reference`, `optimizer_step`, `largest`: |loss - loss of the reference|, the largest
    over seeds."""
    spread: pd.DataFrame
    """`cell` (a reference), `optimizer_step`, `sd`: spread of the loss between seeds."""


def with_room(
    cells: Cells, panels: int, at_best: Mapping[int, float], *, timed: bool
) -> tuple[Cells, str]:
    """Choose the cells that a figure has room for.

    Where settings and global batches differ, each global batch is shown at its best learning rate;
    without a curve there by its cell of the fewest diverged runs, then the lowest final held-out
    loss. Rates then need no panels of their own; other settings that differ still do. Of what is
    then still too much, settings with a best rate come first, then those first in table order.

    Parameters
    ----------
    panels : int
        Settings to keep.
    at_best : mapping of int to float
        As `cells_at_best` returns it.
    timed : bool
        Count only runs whose times are valid.

    Returns
    -------
    Cells
        With fewer runs and contexts, and the same table.
    str
        What a caption says of the choice; empty where all is shown.
    """
    runs = pd.concat([_chosen(cells, status, timed=timed) for status in ("completed", "diverged")])
    drawn = sorted(runs["cell"].unique())
    batch, context = cells.table["global_batch_size"].loc[drawn], cells.context_of()
    settings = context.loc[drawn].nunique()
    best = [cell for cell in at_best if cell in drawn]
    shown, members, said = cells, drawn, f"{panels} of {settings} settings are shown"
    if best and batch.nunique() > 1 and settings > 1:
        others = _others(cells, runs, best)
        members = [*best, *others]
        shown = cells.only(members)
        said = (
            "Each global batch is at its best learning rate (fewest optimizer steps to the target, "
            "or else lowest final held-out loss)"
        )
        rates: dict[int, dict[str, None]] = {}
        for cell in sorted(best, key=lambda cell: at_best[cell]):
            rates.setdefault(batch[cell], {})[significant(at_best[cell], 3)] = None
        named = (f"{list_text(rates[size])} at B = {size}" for size in sorted(rates))
        said += f": {', '.join(named)}"
        if others:
            said += (
                "; where there is no curve at one, the cell of the fewest diverged runs, then the "
                f"lowest loss: {', '.join(others.values())}"
            )
        if without := set(launched_batches(cells.runs)) - set(batch):
            said += f"; no curve at all: {', '.join(f'B = {size}' for size in sorted(without))}"
    elif best and settings > panels:
        said += ", with that of the best learning rate"
    context = shown.context_of()
    first = context.loc[[*best, *members]].unique()[:panels]
    kept = [cell for cell in members if context[cell] in first]
    left = len(drawn) - len(kept)
    caption = f"{said}; {left} of {len(drawn)} cells are left out." if left else ""
    return replace(shown, runs=shown.runs[shown.runs["cell"].isin(kept)]), caption


def loss_curves(
    cells: Cells, steps: pd.DataFrame, evals: pd.DataFrame, *, timed: bool
) -> LossCurves:
    """Compute all curves of a figure.

    Parameters
    ----------
    steps, evals : DataFrame
        As `load` returns them.
    timed : bool
        Use only runs whose times are valid, and compute no differences.
    """
    points = _points(cells, timed=timed)
    # Times differ between decompositions, so that only steps can be paired.
    rows = steps.iloc[:0] if timed else steps
    pairs = loss_differences(cells, rows).dropna(subset=["difference"])
    pairs["largest"] = pairs["difference"].abs()
    spread = seed_spread(cells, rows).rename(columns={"reference": "cell"}).dropna(subset=["sd"])
    return LossCurves(
        steps=mean_curves(cells, steps, "loss", timed=timed, points=points),
        evals=mean_curves(cells, evals, "eval_loss", timed=timed, points=points),
        diverged=diverged_curves(cells, steps, timed=timed),
        differences=_windowed(pairs, points)
        .groupby(["cell", "window"], as_index=False)
        .agg(
            reference=("reference", "first"),
            optimizer_step=("optimizer_step", "mean"),
            largest=("largest", "max"),
        ),
        spread=_windowed(spread, points)
        .groupby(["cell", "window"], as_index=False)
        .agg(optimizer_step=("optimizer_step", "mean"), sd=("sd", "mean")),
    )


def mean_curves(
    cells: Cells, rows: pd.DataFrame, value: str, *, timed: bool, points: int = MAX_POINTS
) -> pd.DataFrame:
    """Average curves over the completed runs of each cell.

    Parameters
    ----------
    rows : DataFrame
        Steps or evaluations, with `sweep_dir`, `run_id` and the columns of progress.
    value : str
        The column to average.
    timed : bool
        Use only runs whose times are valid.
    points : int
        Of a curve, at most.

    Returns
    -------
    DataFrame
        One row for each cell and optimizer step that all of its runs reached (for long curves,
        each window of steps): `cell`, `optimizer_step`, `samples`, `train_time_s` (means),
        `mean`, `low` and `high` (over runs), in order.
    """
    runs = _chosen(cells, "completed", timed=timed)
    joined = _windowed(_joined(runs, rows, value).dropna(subset=[value]), points)
    by_run = joined.groupby(["cell", "run", "window"])[[*PROGRESS, value]].mean()
    curves = by_run.groupby(["cell", "window"]).agg(
        **{name: (name, "mean") for name in PROGRESS},
        mean=(value, "mean"),
        low=(value, "min"),
        high=(value, "max"),
        n=(value, "size"),
    )
    curves = curves.reset_index()
    # Where some runs have ended, the mean would jump to that of the others.
    whole = curves["n"] == curves["cell"].map(runs.groupby("cell").size())
    return curves[whole].drop(columns=["n", "window"]).reset_index(drop=True)


def diverged_curves(cells: Cells, steps: pd.DataFrame, *, timed: bool) -> pd.DataFrame:
    """Return the losses of runs that diverged, up to the last finite one.

    Parameters
    ----------
    cells, steps, timed
        As for `mean_curves`.

    Returns
    -------
    DataFrame
        `cell`, `run`, the columns of progress, and `loss`.
    """
    runs = _chosen(cells, "diverged", timed=timed)
    rows = _joined(runs, steps, "loss")
    return rows[rows["loss"].abs() < np.inf].reset_index(drop=True)


def _chosen(cells: Cells, status: str, *, timed: bool) -> pd.DataFrame:
    runs = cells.runs[cells.runs["status"].eq(status)]
    return runs[runs["timing_valid"]] if timed else runs


def _others(cells: Cells, runs: pd.DataFrame, best: Sequence[int]) -> dict[int, str]:
    """Choose a cell of each global batch of which no best one is drawn; in words, by cell."""
    group = cells.by_batch()
    rest = runs[~runs["cell"].map(group).isin(group.loc[list(best)])]
    keys = ["lost", "final_eval_loss"]
    rest = rest.assign(lost=rest["status"].ne("completed")).reindex(
        columns=["cell", "global_batch_size", "status", "learning_rate", *keys]
    )
    order = rest.groupby("cell")[keys].mean().sort_values(keys).index
    chosen = rest[rest["cell"].isin(group.loc[order].drop_duplicates().index)]
    return {
        int(str(cell)): f"{significant(own['learning_rate'].iloc[0], 3)} at "
        f"B = {own['global_batch_size'].iloc[0]} ({counted(own['status'])})"
        for cell, own in chosen.groupby("cell")
    }


def _joined(runs: pd.DataFrame, rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Attach the rows to the cells of their runs."""
    joined = rows_of(runs, rows, [*PROGRESS, value])
    return joined.assign(cell=runs["cell"].to_numpy()[joined["run"]])


def _points(cells: Cells, *, timed: bool) -> int:
    """Return how many points each curve of a figure may have."""
    curves = _chosen(cells, "completed", timed=timed)["cell"].nunique()
    return min(MAX_POINTS, max(_LEAST_POINTS, _POINTS_A_FIGURE // max(curves, 1)))


def _windowed(rows: pd.DataFrame, points: int) -> pd.DataFrame:
    """Number windows of optimizer steps, so that no curve has more points."""
    longest = rows.groupby("cell")["optimizer_step"].transform("max")
    length = np.ceil(longest / points).clip(lower=1)
    return rows.assign(window=(rows["optimizer_step"] - 1) // length)
