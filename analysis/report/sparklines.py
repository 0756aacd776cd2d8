"""Loss curves as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import RATE, Cells, counted
from batchscape.analysis.hardware import was_started
from batchscape.analysis.joins import rows_of
from batchscape.analysis.numbers import significant

__all__ = ["curve_lines", "sparkline"]

_MOST = 12
_WIDTH = 24
_BARS = "▁▂▃▄▅▆▇█"


def curve_lines(cells: Cells, evals: pd.DataFrame, at_best: Collection[int] = ()) -> Iterator[str]:
    """Write the held-out loss of each cell over its samples; all on the same axes.

    Parameters
    ----------
    evals : DataFrame
        Rows of evaluations, as loaded.
    at_best : collection of int
        Cells that stand for their global batch, as `cells_at_best` returns them.

    Yields
    ------
    str
        A heading, and a line a cell: the curve over 24 places of samples, straight between
        evaluations, its first and last evaluation as means over seeds, and the cell. Of several
        cuts and learning rates of one global batch that with the lowest last loss stands for all:
        of those at its best learning rate where it is known, and among those of which every run
        that was started completed; where there is none, among the others, and the line says how
        many completed. Of more than 12 lines the first are shown. Global batches without a curve
        are named last. Nothing where no completed run was evaluated.
    """
    runs = cells.runs[cells.runs["status"].eq("completed")]
    rows = rows_of(runs, evals, ["samples", "eval_loss"])
    rows = rows[np.isfinite(rows["eval_loss"])]
    if rows.empty:
        return
    rows = rows.sort_values(["run", "samples"], kind="stable")
    ends = rows.groupby("run")["eval_loss"].agg(["first", "last"])
    of_run = runs[["cell", "trajectory_id"]].reset_index(drop=True).loc[ends.index]
    # Repeats of a trajectory count once, as in the comparison.
    by_seed = ends.groupby([of_run["cell"], of_run["trajectory_id"]]).mean()
    ends = by_seed.groupby("cell").mean()
    table = cells.table.loc[ends.index]
    launched = cells.runs[was_started(cells.runs)]
    started = launched.groupby("cell").size()
    completed = runs.groupby("cell").size()
    counts = pd.DataFrame({"completed": completed, "started": started}).loc[ends.index]
    survivors = cells.incomplete().loc[ends.index]
    order = ends.assign(survivors=survivors, other=~ends.index.isin(list(at_best)))
    order = order.sort_values(["other", "survivors", "last"], kind="stable")
    firsts = order.groupby(cells.by_batch().loc[order.index])
    batch = table["global_batch_size"].loc[firsts.head(1).index].sort_index()
    chosen = batch.sort_values(kind="stable").index.tolist()
    which = ", of each global batch the lowest at the end"
    if not order["other"].all():
        which = ", at the best learning rate of each global batch"
        if order["other"].loc[chosen].any():
            which += ", or where it has none the lowest at the end"
    which = which if len(chosen) < len(ends) else ""
    if which and survivors.any():
        which += " (first among cells whose runs all completed)"
    yield f"Held-out loss over samples, mean over seeds{which}"
    labels = _labels(cells, chosen)
    of_run = of_run[of_run["cell"].isin(chosen)]
    drawn = dict(_curves(rows[rows["run"].isin(of_run.index)], of_run, ends))
    whole = np.concatenate(list(drawn.values()))
    low, high = float(np.nanmin(whole)), float(np.nanmax(whole))
    for cell in chosen[:_MOST]:
        losses = f"{significant(ends['first'][cell], 3)} to {significant(ends['last'][cell], 3)}"
        few = f", {counts['completed'][cell]} of {counts['started'][cell]} runs"
        label = labels[cell] + (few if survivors[cell] else "")
        yield f"  {sparkline(drawn[cell], low, high)}  {losses:<16}  {label}"
    if len(chosen) > _MOST:
        yield f"  ... and {len(chosen) - _MOST} more in the figures"
    batch_of = cells.table["global_batch_size"].loc[launched["cell"]].to_numpy()
    for size, statuses in launched["status"].groupby(batch_of):
        if size not in set(batch):
            why = f"no completed run was evaluated ({counted(statuses)})"
            yield f"  {'':{_WIDTH}}  {'none':<16}  B = {size}: {why}"


def sparkline(values: NDArray[np.float64], low: float, high: float) -> str:
    """Draw values as bars of eight heights.

    Parameters
    ----------
    values : array, shape (n,)
        NaN leaves a place empty.
    low, high : float
        Ends of the scale.
    """
    span = high - low
    shares = (values - low) / span if span > 0 else values - low
    heights = 7 * shares.clip(0, 1)
    return "".join(" " if np.isnan(height) else _BARS[round(float(height))] for height in heights)


def _curves(
    rows: pd.DataFrame, of_run: pd.DataFrame, ends: pd.DataFrame
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Read each cell's mean curve at the places of one axis; its ends are its evaluations."""
    places = np.unique(np.linspace(rows["samples"].min(), rows["samples"].max(), _WIDTH))
    by_run = {
        run: np.interp(places, own["samples"], own["eval_loss"], left=np.nan, right=np.nan)
        for run, own in rows.groupby("run")
    }
    for cell, runs in of_run.groupby("cell").groups.items():
        by_seed = pd.DataFrame([by_run[run] for run in runs]).groupby(
            of_run.loc[runs, "trajectory_id"].to_numpy()
        )
        # Where some runs have ended, the mean would jump to that of the others.
        bars = by_seed.mean().mean(skipna=False).to_numpy(dtype=np.float64, copy=True)
        own = np.flatnonzero(np.isfinite(bars))
        if not len(own):
            # Evaluated between two places only.
            middle = rows.loc[rows["run"].isin(runs), "samples"].mean()
            own = np.array([np.abs(places - middle).argmin()])
        bars[own[[0, -1]]] = ends.loc[int(str(cell)), ["first", "last"]].to_numpy()
        yield int(str(cell)), bars


def _labels(cells: Cells, chosen: list[int]) -> pd.Series[str]:
    """Name cells by batch, cut and rate, and those that are then alike by sweep or settings."""
    table = cells.table.loc[chosen]
    plain = "B = " + table["global_batch_size"].astype(str)
    plain += ", " + cells.labels([RATE] if RATE in cells.shown else []).loc[chosen]
    if plain.is_unique:
        return plain
    names = cells.runs.groupby("cell")["sweep_name"].unique().loc[chosen]
    by_sweep = plain + ", " + names.map(lambda own: " and ".join(map(str, own)))
    if by_sweep.is_unique:
        return by_sweep
    differ = [name for name in cells.shown if table[name].nunique(dropna=False) > 1]
    batch = cells.table["global_batch_size"].astype(str)
    return ("B = " + batch + ", " + cells.labels(differ)).loc[chosen]
