"""Which learning rate each global batch is judged at: its best one, where there is a choice."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.claims.evidence import Context

__all__ = ["Chosen", "best_rates", "loss_of", "score_of"]

_BATCH = "global_batch_size"


class Chosen(NamedTuple):
    """Runs at the learning rate that serves their global batch best."""

    runs: pd.DataFrame
    """Rows of the runs given, in their order."""
    note: str | None
    """What weakens a comparison of batches; None where every batch had its rate tuned."""


def loss_of(context: Context) -> pd.Series[float]:
    """Return the final loss of every run of a context, as an index-aligned column.

    It is the held-out one where every completed run has it, else the training loss; infinite for
    diverged runs, NaN for others that did not complete.
    """
    figures = context.figures
    name = "final_eval_loss" if figures["final_eval_loss"].notna().all() else "final_loss"
    loss = figures[name].reindex(context.runs.index).astype(float)
    return loss.mask(context.runs["status"].eq("diverged"), np.inf)


def score_of(context: Context) -> pd.Series[float]:
    """Return what a learning rate is chosen by: low is good, infinite is out of the question.

    It is the final loss; where runs stopped at a target, the samples that they needed for it.
    """
    stopped = context.runs["stop_reason"].eq("target")
    if not stopped.any():
        return loss_of(context)
    samples = pd.to_numeric(context.runs["samples"]).astype(float).where(stopped, np.inf)
    ended = context.runs["status"].isin(["completed", "diverged"])
    return samples.where(ended)


def best_rates(runs: pd.DataFrame, value: pd.Series[float]) -> Chosen:
    """Keep the runs at the learning rate with the lowest mean value, for every global batch.

    Parameters
    ----------
    runs : DataFrame
        With `global_batch_size` and `learning_rate`.
    value : Series
        What is to be low, aligned with `runs`; infinite where a run never gets there.
    """
    table = runs[[_BATCH, "learning_rate"]].assign(value=value.to_numpy(dtype=float))
    table = table.dropna(subset=["value"])
    means = table.groupby([_BATCH, "learning_rate"], dropna=False)["value"].mean()
    best, tuned = {}, True
    for batch, own in means.groupby(level=0):
        rates = own.droplevel(0).sort_index()
        position = int(np.argmin(rates.to_numpy()))
        best[batch] = rates.index[position]
        tuned &= len(rates) > 2 and 0 < position < len(rates) - 1
    wanted = runs[_BATCH].map(best)
    rate = runs["learning_rate"]
    kept = runs[_BATCH].isin(list(best)) & (rate.eq(wanted) | (rate.isna() & wanted.isna()))
    note = None if tuned else "learning rates were not tuned for each global batch"
    return Chosen(runs[kept], note)
