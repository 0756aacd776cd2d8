"""Runs that stand for each global batch, and scores that choose its best learning rate."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.learning_rate.aim import LOSS, STEPS
from batchscape.record.noise_scale import has_no_noise_scale

BATCH = "global_batch_size"
_PLACE = ["data_parallel_size", "micro_batch_size"]


def of_one_place(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Return the rows that differ in accumulation alone, of most batches; None without two."""
    places = rows.groupby(_PLACE)[BATCH]
    is_most = places.ngroup().eq(places.nunique().argmax()) if len(rows) else rows.index < 0
    return rows[is_most] if rows.loc[is_most, BATCH].nunique() > 1 else None


def comparable(runs: pd.DataFrame) -> pd.DataFrame | None:
    """Return all runs, or those of one place where the objective depends on the cut."""
    is_of_cut = runs["not_invariant"].map(has_no_noise_scale).astype(bool)
    return of_one_place(runs) if is_of_cut.any() else runs


def loss_name(context: Context) -> str:
    """Name the final loss: the held-out one where every completed run has it, else of training."""
    return LOSS if context.figures[LOSS].notna().all() else "final_loss"


def score_of(context: Context) -> pd.Series[float]:
    """Return the final loss, or the samples to a target; infinite where a run cannot be best."""
    runs = context.runs
    stopped = runs["stop_reason"].eq("target")
    if stopped.any():
        samples = pd.to_numeric(runs["samples"]).astype(float).where(stopped, np.inf)
        return samples.where(runs["status"].isin(["completed", "diverged"])).rename(STEPS)
    loss = context.figures[loss_name(context)].reindex(runs.index).astype(float)
    return loss.mask(runs["status"].eq("diverged"), np.inf).rename(LOSS)


def untuned(runs: pd.DataFrame) -> str | None:
    """Say that learning rates were not tuned; None where they were for every batch."""
    return None if runs["tuned"].all() else "learning rates were not tuned for each global batch"
