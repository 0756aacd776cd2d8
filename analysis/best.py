"""Which cell is best in a figure, where the data distinguish it from every other one.

Cells are compared within one context: equal model, data, hardware and other settings that do not
follow from the global batch. Step times are compared at one global batch size, and losses after
equal samples. Decompositions of one global batch share their trajectories, so they are one
candidate for a loss; those of a program are candidates of their own. Runs are paired by seed, times
and memory by timing repeat too. If a run of the best candidate did not complete, no cell is marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtr

from batchscape.analysis.cells import SEEDS, Cells
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.joins import column_of
from batchscape.analysis.multiplicity import holm
from batchscape.record.figures import COMPARED, FIGURES

SIGNIFICANCE = 0.05
"""Adjusted p value below which the best is marked."""

_TIE = 1e-6
"""Relative difference up to which two means count as equal: rounding moves losses by less."""
_SAME_TASK = ("model.", "data.", "evaluation.")

Floats = npt.NDArray[np.float64]


def mark_best(cells: Cells) -> pd.DataFrame:
    """Mark the best cells by figure.

    Returns
    -------
    DataFrame
        Indexed by `cell`, for each of `COMPARED`: `_best` (bool: marked) and `_best_p` (float:
        largest p value of the best against the others, adjusted by Holm's method; missing for
        other cells). `best_comparisons` counts the p values adjusted together, in every row.
    """
    contests: list[tuple[str, list[int], float, bool]] = []
    for name in COMPARED:
        outcomes = _outcomes(_entries(cells, name), FIGURES[name].kind == "loss")
        contests += [(name, *outcome) for outcome in outcomes]
    adjusted = holm(np.array([p for *_, p, _ in contests]))
    p_values: dict[str, dict[int, float]] = {name: {} for name in COMPARED}
    marked: dict[str, set[int]] = {name: set() for name in COMPARED}
    for (name, cells_of_best, _, completed), p in zip(contests, adjusted, strict=True):
        p_values[name].update(dict.fromkeys(cells_of_best, float(p)))
        if completed and p < SIGNIFICANCE:
            marked[name].update(cells_of_best)
    index = cells.table.index
    columns: dict[str, Any] = {}
    for name, p_by_cell in p_values.items():
        columns[f"{name}_best"] = index.isin(marked[name])
        columns[f"{name}_best_p"] = pd.Series(p_by_cell, index=index, dtype=float)
    return pd.DataFrame(columns, index=index).assign(best_comparisons=len(contests))


def p_of_best(values: Floats, best: int) -> float:
    """Test one candidate against each other one, by differences of paired values.

    Parameters
    ----------
    values : array of float, shape (pairs, candidates)
        Lower is better; NaN where a candidate lacks a pair.
    best : int
        Column of the candidate.

    Returns
    -------
    float
        The largest two-sided p value of the paired t-tests; 1 where another candidate is not
        worse on average; NaN where one shares fewer than `FEWEST` pairs with it.
    """
    others = np.delete(values, best, axis=1)
    differences = others - values[:, [best]]
    counts = np.isfinite(differences).sum(axis=0)
    if not counts.size or counts.min() < FEWEST:
        return float("nan")
    mean = np.nanmean(differences, axis=0)
    sd = np.nanstd(differences, axis=0, ddof=1)
    scale = np.nanmax(np.abs(values))
    if (mean <= _TIE * scale).any():
        return 1.0
    # Memory of equal runs has no spread, so that any difference is certain.
    with np.errstate(divide="ignore"):
        t = mean / (sd / np.sqrt(counts))
    return float(np.max(2 * stdtr(counts - 1, -t)))


def _entries(cells: Cells, name: str) -> pd.DataFrame:
    """Collect one row a launched run: its contest, candidate, pair and value (lower is better)."""
    runs = cells.runs[cells.runs["status"].ne("rejected")]
    value, figure = cells.figures[name], FIGURES[name]
    shared_settings = [n for n in cells.settings if n in cells.contexts or n.startswith(_SAME_TASK)]
    keys: dict[str, Any] = {key: runs["cell"].map(cells.table[key]) for key in shared_settings}
    pair_columns = [seed for seed in SEEDS if seed in runs]
    candidate = runs["cell"]
    if figure.kind == "loss":
        table = cells.table.assign(program=cells.table.index)
        table["program"] = table["program"].where(cells.of_programs())
        settings_of_batch = ["global_batch_size", "program", *cells.settings]
        candidate_of_cell = table.groupby(settings_of_batch, dropna=False, sort=False).ngroup()
        candidate = candidate.map(candidate_of_cell)
        stopped = column_of(runs, "stop_reason").eq("target")
        value = value.mask(stopped)
        samples = pd.to_numeric(runs["samples"]).where(runs["status"].eq("completed"))
        keys["samples"] = samples.groupby(candidate).transform("max")
    elif "timing_repeat" in runs:
        pair_columns.append("timing_repeat")
    if name == "step_time_s":
        keys["global_batch_size"] = runs["global_batch_size"]
    # Samples and tokens a second give the same comparison; a second test would only
    # lower the power of the others.
    if name == "samples_per_s":
        value = value.where(cells.figures["tokens_per_s"].isna())
    # A run out of memory says nothing about a loss: other decompositions have that loss too.
    # One run with another end, and its candidate is not marked.
    allowed_statuses = ["completed", "oom"] if figure.kind == "loss" else ["completed"]
    return pd.DataFrame(
        {
            "contest": _numbered(pd.DataFrame(keys, index=runs.index)),
            "candidate": candidate,
            "pair": _numbered(runs[pair_columns]),
            "cell": runs["cell"],
            "value": (1.0 if figure.better == "lower" else -1.0) * value.reindex(runs.index),
            "leaves_markable": runs["status"].isin(allowed_statuses),
        }
    )


def _numbered(keys: pd.DataFrame) -> pd.Series[int]:
    """Number the rows that agree in all columns."""
    if keys.columns.empty:
        return pd.Series(0, index=keys.index)
    return keys.groupby(list(keys.columns), dropna=False).ngroup()


def _outcomes(entries: pd.DataFrame, is_loss: bool) -> Iterator[tuple[list[int], float, bool]]:
    """Yield the cells of the best candidate of each contest, its p value, and its completeness."""
    measured = entries.dropna(subset="value")
    rivals = measured.groupby("contest")["candidate"].transform("nunique")
    measured = measured[rivals.gt(1)]
    paired = measured.groupby(["contest", "candidate", "pair"], as_index=False)[["value"]].mean()
    # Means as the table shows them: over seeds for a loss, over runs for the others.
    averaged = paired if is_loss else measured
    means = averaged.groupby(["contest", "candidate"])["value"].mean()
    completed_by_candidate = entries.groupby("candidate")["leaves_markable"].all().to_dict()
    cells_by_candidate = measured.groupby("candidate")["cell"].unique().to_dict()
    if paired.empty:
        return
    keys = pd.MultiIndex.from_frame(paired[["contest", "candidate"]])
    paired["mean"] = means.reindex(keys).to_numpy()
    # There are thousands of small contests, and slices of arrays are much faster than groups.
    columns = [paired[name].to_numpy() for name in ("candidate", "pair", "value", "mean")]
    starts = np.flatnonzero(np.diff(paired["contest"].to_numpy(), prepend=-1))
    for rows in np.split(np.arange(len(paired)), starts[1:]):
        candidates, pairs, value, mean = (column[rows] for column in columns)
        names, column = np.unique(candidates, return_inverse=True)
        _, row = np.unique(pairs, return_inverse=True)
        values = np.full((row.max() + 1, len(names)), np.nan)
        values[row, column] = value
        winner = candidates[mean.argmin()]
        p = p_of_best(values, int(np.searchsorted(names, winner)))
        if not np.isnan(p):
            yield sorted(cells_by_candidate[winner].tolist()), p, completed_by_candidate[winner]
