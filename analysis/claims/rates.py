"""Which runs stand for each global batch: those at its best learning rate."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.learning_rate.aim import LOSS, STEPS
from batchscape.analysis.learning_rate.choice import at_best_learning_rate
from batchscape.record.noise_scale import has_no_noise_scale

__all__ = [
    "BATCH",
    "at_best_rates",
    "comparable",
    "loss_name",
    "of_one_place",
    "score_of",
    "untuned",
]

BATCH = "global_batch_size"
_PLACE = ["data_parallel_size", "micro_batch_size"]


def of_one_place(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Return the rows that differ in accumulation alone, of most batches; None without two."""
    places = rows.groupby(_PLACE)[BATCH]
    is_most = places.ngroup().eq(places.nunique().argmax()) if len(rows) else rows.index < 0
    return rows[is_most] if rows.loc[is_most, BATCH].nunique() > 1 else None


def comparable(runs: pd.DataFrame) -> pd.DataFrame | None:
    """Return the runs whose losses the global batch alone tells apart: all, as cuts train alike.

    Where the objective depends on the cut, as with batch normalisation, those of one place.
    """
    is_of_cut = runs["not_invariant"].map(has_no_noise_scale).astype(bool)
    return of_one_place(runs) if is_of_cut.any() else runs


def loss_name(context: Context) -> str:
    """Name the final loss: the held-out one where every completed run has it, else of training."""
    return LOSS if context.figures[LOSS].notna().all() else "final_loss"


def score_of(context: Context) -> pd.Series[float]:
    """Return what a learning rate is chosen by: low is good, infinite is out of the question.

    It is the final loss; where runs stopped at a target, the samples that they needed for it. Its
    name is the column by which `at_best_learning_rate` knows the one from the other.
    """
    runs = context.runs
    stopped = runs["stop_reason"].eq("target")
    if stopped.any():
        samples = pd.to_numeric(runs["samples"]).astype(float).where(stopped, np.inf)
        return samples.where(runs["status"].isin(["completed", "diverged"])).rename(STEPS)
    loss = context.figures[loss_name(context)].reindex(runs.index).astype(float)
    return loss.mask(runs["status"].eq("diverged"), np.inf).rename(LOSS)


def at_best_rates(runs: pd.DataFrame, score: pd.Series[float]) -> pd.DataFrame:
    """Keep the runs at the learning rate that is best for their global batch, and target.

    It is chosen as in the report's section on learning rates; a seed's cuts count by their mean.

    Parameters
    ----------
    runs : DataFrame
        With `global_batch_size`, `learning_rate`, `seed_block`, and `target_loss` if there is one.
    score : Series
        Of all runs, by their index, and named as by `score_of`.

    Returns
    -------
    DataFrame
        Rows of `runs`, with `tuned`: whether the rate lies inside the range of those that were run.
    """
    name = str(score.name)
    keys = [key for key in ("target_loss", BATCH, "learning_rate") if key in runs]
    table = runs[keys].assign(seed=runs["seed_block"], **{name: score.reindex(runs.index)})
    known = table.dropna(subset=[name]).groupby([*keys, "seed"], dropna=False)
    best = at_best_learning_rate(known[name].mean().reset_index(), name)
    chosen = best[[*keys, "tuned"]].drop_duplicates()
    return runs.reset_index(names="row").merge(chosen, on=keys).set_index("row")


def untuned(runs: pd.DataFrame) -> str | None:
    """Say what weakens a comparison of batches; None where every batch had its rate tuned."""
    return None if runs["tuned"].all() else "learning rates were not tuned for each global batch"
