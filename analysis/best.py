"""Which cell is best in a figure, where its paired interval to every other one leaves out 0.

Cells are compared within one context: equal model, data, hardware and other settings that do not
follow from the global batch. Step times are compared at one global batch size, and losses after
equal samples. Decompositions of one global batch share their trajectories, so they are one
candidate for a loss; those of a program are candidates of their own. Runs are paired by seed, times
and memory by timing repeat too. If a run of the best candidate did not complete, no cell is marked.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from batchscape.analysis.cells import SEEDS, Cells
from batchscape.analysis.estimates import FEWEST, LEVEL
from batchscape.analysis.joins import column_of
from batchscape.record.figures import COMPARED, FIGURES

_TIE = 1e-6
"""Relative difference up to which two means count as equal: rounding moves losses by less."""
_SAME_TASK = ("model.", "data.", "evaluation.")


def mark_best(cells: Cells) -> tuple[pd.DataFrame, pd.Series[int]]:
    """Mark the best cells by figure.

    Returns
    -------
    tuple
        A table, indexed by `cell`, of which cells are marked (bool) in each of `COMPARED`, and by
        figure how many contests have enough pairs: the intervals hold for all of them together.
    """
    runs = cells.runs[cells.runs["status"].ne("rejected")]
    shared = [n for n in cells.settings if n in cells.contexts or n.startswith(_SAME_TASK)]
    task = _numbered(
        pd.DataFrame({n: runs["cell"].map(cells.table[n]) for n in shared}, runs.index)
    )
    entries = [_entries(cells, runs, task, name).assign(figure=name) for name in COMPARED]
    rows = pd.concat(entries, ignore_index=True)
    for name in ("contest", "candidate"):
        rows[name] = _numbered(rows[["figure", name]])
    differences = compare_with_best(rows)
    differences = differences[differences.groupby("contest")["n"].transform("min").ge(FEWEST)]
    is_best = (
        is_worse(differences, differences["contest"].nunique()).groupby(differences["best"]).all()
    )
    is_complete = rows.groupby("candidate")["leaves_markable"].transform("all")
    has_won = rows["candidate"].isin(is_best.index[is_best]) & is_complete & rows["value"].notna()
    cells_of = {name: rows.loc[has_won & rows["figure"].eq(name), "cell"] for name in COMPARED}
    marks = {name: cells.table.index.isin(best) for name, best in cells_of.items()}
    contested = rows[rows["candidate"].isin(is_best.index)].drop_duplicates("candidate")
    counts = contested["figure"].value_counts().reindex(COMPARED, fill_value=0)
    return pd.DataFrame(marks, index=cells.table.index), counts


def compare_with_best(rows: pd.DataFrame) -> pd.DataFrame:
    """Pair the values of each candidate with those of the best one of its contest.

    Parameters
    ----------
    rows : DataFrame
        One row a run: `contest`, `candidate` and `pair` (numbers), and `value`, of which less is
        better. Several runs of one pair are averaged.

    Returns
    -------
    DataFrame
        One row a contest and candidate but the `best`: `mean`, `sd` and `n` of its values less
        those of the best one, and `scale`, the size of that one's mean.
    """
    keys = ["contest", "candidate"]
    paired = rows.groupby([*keys, "pair"])["value"].mean().dropna().reset_index()
    means = paired.groupby(keys)["value"].mean().reset_index()
    best = means.sort_values("value", kind="stable").drop_duplicates("contest")
    best = best.rename(columns={"candidate": "best", "value": "scale"})
    table = paired.merge(best, on="contest")
    base = table[table["candidate"].eq(table["best"])]
    others = table[table["candidate"].ne(table["best"])].merge(
        base[["contest", "pair", "value"]], on=["contest", "pair"], how="left", suffixes=("", "_of")
    )
    difference = others["value"] - others["value_of"]
    groups = difference.groupby([others[name] for name in ("contest", "best", "candidate")])
    apart = groups.agg(["mean", "std", "count"]).set_axis(["mean", "sd", "n"], axis=1)
    return apart.reset_index().merge(best[["contest", "scale"]].abs(), on="contest")


def is_worse(differences: pd.DataFrame, n_contests: int) -> pd.Series[bool]:
    """Return for each candidate whether its interval of the difference to the best excludes 0.

    The t-intervals hold for so many contests at once (Bonferroni). Of one contest all must leave
    out 0, so that its candidates need no correction (intersection-union test).
    """
    quantile = stdtrit(differences["n"] - 1, 1 - (1 - LEVEL) / 2 / max(n_contests, 1))
    low = differences["mean"] - quantile * differences["sd"] / np.sqrt(differences["n"])
    is_apart: pd.Series[bool] = low.gt(0) & differences["mean"].gt(_TIE * differences["scale"])
    return is_apart


def _entries(cells: Cells, runs: pd.DataFrame, task: pd.Series[int], name: str) -> pd.DataFrame:
    """Collect one row a launched run: its contest, candidate, pair and value (lower is better)."""
    value, is_loss = cells.figures[name], FIGURES[name].kind == "loss"
    contest, candidate = {"task": task}, runs["cell"]
    blocks = SEEDS if is_loss else (*SEEDS, "timing_repeat")
    if is_loss:
        table = cells.table.assign(program=cells.table.index)
        table["program"] = table["program"].where(cells.of_programs())
        candidates = _numbered(table[["global_batch_size", "program", *cells.settings]])
        candidate = candidate.map(candidates)
        value = value.mask(column_of(runs, "stop_reason").eq("target"))
        samples = pd.to_numeric(runs["samples"]).where(runs["status"].eq("completed"))
        contest["samples"] = samples.groupby(candidate).transform("max")
    if name == "step_time_s":
        contest["global_batch_size"] = runs["global_batch_size"]
    # Samples and tokens a second give the same comparison; a second test would only
    # lower the power of the others.
    if name == "samples_per_s":
        value = value.where(cells.figures["tokens_per_s"].isna())
    # A run out of memory says nothing about a loss: other decompositions have that loss too.
    # One run with another end, and its candidate is not marked.
    allowed_statuses = ["completed", "oom"] if is_loss else ["completed"]
    return pd.DataFrame(
        {
            "contest": _numbered(pd.DataFrame(contest)),
            "candidate": candidate,
            "pair": _numbered(runs[[block for block in blocks if block in runs]]),
            "cell": runs["cell"],
            "value": value.reindex(runs.index) * (1 if FIGURES[name].better == "lower" else -1),
            "leaves_markable": runs["status"].isin(allowed_statuses),
        }
    )


def _numbered(keys: pd.DataFrame) -> pd.Series[int]:
    """Return a number for each row; rows that agree in all columns have the same number."""
    if keys.columns.empty:
        return pd.Series(0, index=keys.index)
    return keys.groupby(list(keys.columns), dropna=False).ngroup()
