"""Rises of training losses, and held-out losses at equal training losses."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

WINDOWS = 20
"""Windows of equal samples over a training, in which the loss is averaged: the same samples for
every global batch, so that their noise is the same too."""


def largest_rises(steps: pd.DataFrame, batch: pd.Series[int], ended: pd.Index) -> pd.Series[float]:
    """Compute the largest rise of each run's training loss above its lowest so far.

    Parameters
    ----------
    steps : DataFrame
        One row an optimizer step, in order of time: `run`, `samples` and `loss`, of which
        those that are not finite do not count.
    batch : Series
        Global batch of each run.
    ended : Index
        Runs that ended: only samples that all of these saw count.

    Returns
    -------
    Series
        By the index of `batch`, as a share of the mean loss in the first window: near the end a
        loss may be so small that its own share would make every ripple large.
    """
    # One infinite loss would make its window so, and with it the scale of all runs.
    rows = steps[np.isfinite(steps["loss"])].dropna(subset=["samples"])
    last_samples = rows.groupby("run")["samples"].max()
    horizon = last_samples[last_samples.index.isin(ended)].min()
    windows = 0 if np.isnan(horizon) else min(WINDOWS, int(horizon // batch.max()))
    if windows < 2:
        return pd.Series(np.nan, index=batch.index)
    # A step stands in the window of the middle of its samples.
    middle = rows["samples"] - rows["run"].map(batch) / 2
    window = middle * windows // horizon
    inside = window < windows
    means = rows[inside].groupby(["run", window[inside]])["loss"].mean()
    rises: pd.Series[float] = (means - means.groupby(level=0).cummin()).groupby(level=0).max()
    return rises.reindex(batch.index) / float(means.groupby(level=0).first().mean())


def at_equal_loss(
    steps: pd.DataFrame, evals: pd.DataFrame, runs: pd.Index
) -> tuple[float, pd.Series[float]] | None:
    """Compare held-out losses where training losses are equal.

    Parameters
    ----------
    steps, evals : DataFrame
        `run`, `samples`, and `loss` of optimizer steps or `eval_loss` of evaluations.
    runs : Index
        Runs to compare.

    Returns
    -------
    tuple or None
        The lowest training loss that all of them reached, and by run the held-out loss where the
        training loss first falls to it. None where a run has fewer than three evaluations, or two
        that can be compared.
    """
    tables = steps[["run", "samples", "loss"]], evals[["run", "samples", "eval_loss"]]
    by_run = [dict(iter(rows.dropna().groupby("run"))) for rows in tables]
    if runs.empty or not all({*runs} <= rows.keys() for rows in by_run):
        return None
    paths = [_path(*(rows[run] for rows in by_run)) for run in runs]
    complete = [path for path in paths if path is not None]
    if len(complete) < len(runs):
        return None
    level = max(float(training.min()) for training, _ in complete)
    losses = []
    for training, held_out in complete:
        below = int((training <= level).argmax())
        around = [below, max(below - 1, 0)]
        losses.append(float(np.interp(level, training[around], held_out[around])))
    return level, pd.Series(losses, index=runs)


def _path(
    steps: pd.DataFrame, evals: pd.DataFrame
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return training and held-out loss of a run wherever both are known.

    The training loss at an evaluation is the mean over samples from half an interval before it to
    half an interval after it; a mean over one side would lag where the loss falls fast.
    """
    (samples, losses), (places, held_out) = (
        rows.sort_values("samples").drop(columns="run").to_numpy(dtype=np.float64).T
        for rows in (steps, evals)
    )
    if len(losses) < 2 or len(places) < 3:
        return None
    half = float(np.median(np.diff(places))) / 2
    # The loss of a step is that of the weights before it: a larger batch looks further behind.
    samples = np.r_[0.0, samples[:-1]]
    is_covered = (places >= half) & (places + half <= samples[-1])
    if is_covered.sum() < 2 or half <= 0:
        return None
    slices = np.diff(samples) * (losses[1:] + losses[:-1]) / 2
    area = np.r_[0.0, np.cumsum(slices)]
    upper, lower = (np.interp(places[is_covered] + sign * half, samples, area) for sign in (1, -1))
    return (upper - lower) / (2 * half), held_out[is_covered]
