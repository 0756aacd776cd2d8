"""Which learning rate each global batch is judged at: its best one, where there is a choice."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.learning_rate.aim import LOSS, STEPS
from batchscape.analysis.learning_rate.choice import at_best_learning_rate

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

    It is the final loss; where runs stopped at a target, the samples that they needed for it. Its
    name is the column by which `at_best_learning_rate` knows the one from the other.
    """
    stopped = context.runs["stop_reason"].eq("target")
    if not stopped.any():
        return loss_of(context).rename(LOSS)
    samples = pd.to_numeric(context.runs["samples"]).astype(float).where(stopped, np.inf)
    ended = context.runs["status"].isin(["completed", "diverged"])
    return samples.where(ended).rename(STEPS)


def best_rates(runs: pd.DataFrame, score: pd.Series[float]) -> Chosen:
    """Keep the runs at the learning rate that is best for their global batch.

    It is chosen as in the report's section on learning rates; a seed's cuts count by their mean.

    Parameters
    ----------
    runs : DataFrame
        With `global_batch_size`, `learning_rate` and `seed_block`.
    score : Series
        Aligned with `runs` and named as by `score_of`.
    """
    name, columns = str(score.name), [_BATCH, "learning_rate"]
    table = runs[columns].assign(seed=runs["seed_block"], **{name: score.to_numpy(dtype=float)})
    table = table.dropna(subset=[name])
    means = table.groupby([*columns, "seed"], dropna=False)[name].mean().reset_index()
    best = at_best_learning_rate(means, name)
    kept = pd.MultiIndex.from_frame(runs[columns]).isin(pd.MultiIndex.from_frame(best[columns]))
    note = None if best["tuned"].all() else "learning rates were not tuned for each global batch"
    return Chosen(runs[kept], note)
