"""Claims about the ends of the range: too small trains unstably, too large generalises worse."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.claims.claim import ClaimResult, few_pairs, found, nothing, undecided
from batchscape.analysis.claims.contrasts import (
    CONTRADICTED,
    OPEN,
    SUPPORTED,
    Contrast,
    any_above,
    of_comparable_cuts,
    said,
)
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.rates import best_rates, loss_of, score_of
from batchscape.analysis.comparing.pairs import logarithm
from batchscape.analysis.estimates import Estimate

__all__ = ["held_out_at", "largest_rise", "too_large_generalises_worse", "too_small_unstable"]

_BATCH = "global_batch_size"
_WINDOWS = 20
"""Windows of equal samples over a training, in which the loss is averaged: the same samples for
every global batch, so that their noise is the same too."""
_RISE = 0.02
"""A rise larger than the reference's by 2 % of the loss at the start counts as unstable: ours."""
_EPOCHS = 2.0
"""Before the data come around, training loss is a held-out loss, and there is no gap to widen."""
_FISHER = 0.025
"""Half of 5 %: the other half goes to the rise, whose 95 % interval ends at a one-sided 2.5 %."""


class _Ends(NamedTuple):
    """The batch at an end of the range, the middle one, and their runs at their best rates."""

    end: int
    middle: int
    runs: pd.DataFrame
    note: str | None


def too_small_unstable(context: Context) -> ClaimResult | None:
    """The smallest global batch diverges or rises more often than the middle one."""
    ends = _ends(context, largest=False)
    if ends is None:
        return None
    runs = ends.runs[ends.runs["status"].isin(["completed", "diverged"])]
    # Cuts and repeats of one seed diverge together: a seed counts once.
    of_seed = runs["status"].eq("diverged").groupby([runs[_BATCH], runs["seed_block"]]).any()
    diverged = of_seed.groupby(level=0).agg(["sum", "size"])
    definition = "difference of the largest rise of the training loss, over its start"
    rises = runs.assign(value=_rises(context, runs))
    contrasts = _paired(rises, ends)
    p = _more_often(diverged, ends)
    decision = any_above(contrasts, _RISE)
    counts = ", ".join(f"{row['sum']} of {row['size']} at {b}" for b, row in diverged.iterrows())
    if decision is None and p < _FISHER:
        return _diverges(diverged, ends, p, counts, runs["run_id"])
    if decision is None:
        reason = f"{few_pairs(contrasts)}; diverged: {counts}"
        return undecided(contrasts, definition, reason)
    answer = decision.answer
    if p < _FISHER:
        answer = SUPPORTED
    elif answer == CONTRADICTED and diverged.loc[ends.end, "sum"]:
        answer = OPEN
    explanation = (
        f"Largest rise of the training loss above its lowest so far, in {_WINDOWS} windows of the "
        "same samples, as a share of the loss in the first: "
        f"{said(decision.deciding, 'difference')}; unstable means 0.02 more than the middle batch, "
        "or more often diverged: 2.5 % each, the one by the lower end of its 95 % interval, the "
        f"other by Fisher's exact test (here p = {p:.2g}). Diverged: {counts}. "
        f"{_spreads(context, runs, ends)}{_beware(ends.note)}"
    )
    return found(
        answer,
        decision.deciding,
        contrasts,
        explanation,
        definition,
        ratio=False,
        note=ends.note,
    )


def too_large_generalises_worse(context: Context) -> ClaimResult | None:
    """At an equal training loss the largest global batch has a higher held-out loss."""
    ends = _ends(context, largest=True)
    if ends is None:
        return None
    runs = ends.runs[ends.runs["status"].eq("completed")]
    definition = "difference of held-out loss at an equal training loss"
    # How often the least of the runs went over its training data.
    counts = runs.reindex(columns=["samples", "train_samples"]).apply(pd.to_numeric).astype(float)
    epochs = float((counts["samples"] / counts["train_samples"]).min(skipna=False))
    ids = runs["run_id"]
    if not epochs >= _EPOCHS:
        shown = "an unknown number of times" if np.isnan(epochs) else f"{epochs:.2g} times"
        reason = (
            f"training went over its data {shown}; before it has come around "
            f"{_EPOCHS:g} times a training loss is a held-out loss, and generalisation is untested"
        )
        return nothing(reason, definition, ids)
    paths = [_path(*rows) for rows in _rows(context, runs)]
    usable = [path for path in paths if path is not None]
    if len(usable) < len(paths) or not paths:
        reason = "some run has fewer than three evaluations to compare at an equal training loss"
        return nothing(reason, definition, ids)
    level = max(float(path[0].min()) for path in usable)
    if context.margin is None:
        return nothing(context.no_margin, definition, ids)
    held_out = [held_out_at(level, *path) for path in usable]
    contrasts = _paired(runs.assign(value=held_out), ends)
    decision = any_above(contrasts, context.margin)
    if decision is None:
        return undecided(contrasts, definition)
    gaps = runs.assign(value=[float(path[1][-1] - path[0][-1]) for path in usable])
    final = [said(contrast, "difference") for contrast in _paired(gaps, ends)]
    explanation = (
        f"Held-out loss where the training loss is {level:.4g}, which all runs reached, after "
        f"{epochs:.2g} times over the data: {said(decision.deciding, 'difference')}; worse means "
        f"by more than {context.margin:g} nats. Held-out minus training loss at the end, which "
        f"also differs where one batch has trained further: {'; '.join(final)}. Shallue et al. "
        "2019 found no such effect once every batch was tuned and trained to the same goal."
        f"{_beware(ends.note)}"
    )
    return found(
        decision.answer,
        decision.deciding,
        contrasts,
        explanation,
        definition,
        ratio=False,
        unit="nats",
        note=ends.note,
    )


def largest_rise(losses: NDArray[np.float64]) -> float:
    """Return the largest rise of a loss above its lowest value so far.

    Parameters
    ----------
    losses : array, shape (n,)
        In order of time; NaN where there is none.
    """
    known = losses[np.isfinite(losses)]
    if not len(known):
        return np.nan
    return float((known - np.minimum.accumulate(known)).max())


def held_out_at(
    level: float, training: NDArray[np.float64], held_out: NDArray[np.float64]
) -> float:
    """Return the held-out loss where the training loss first falls to a level.

    Parameters
    ----------
    level : float
        A training loss; NaN is returned where it is not reached.
    training, held_out : array, shape (n,)
        Both losses at the same places of a training, in order of time.
    """
    below = np.flatnonzero(training <= level)
    if not len(below):
        return np.nan
    last = int(below[0])
    if last == 0:
        return float(held_out[0])
    before, after = training[last - 1], training[last]
    share = (before - level) / (before - after)
    return float(held_out[last - 1] + share * (held_out[last] - held_out[last - 1]))


def _ends(context: Context, *, largest: bool) -> _Ends | None:
    comparable = of_comparable_cuts(context.runs)
    if comparable is None:
        return None
    chosen = best_rates(comparable, score_of(context).reindex(comparable.index))
    batches = sorted(chosen.runs[_BATCH].unique())
    if len(batches) < 2:
        return None
    end = batches[-1] if largest else batches[0]
    middle = batches[(len(batches) - 1) // 2] if largest else batches[len(batches) // 2]
    runs = chosen.runs[chosen.runs[_BATCH].isin([end, middle])]
    return _Ends(int(end), int(middle), runs, chosen.note)


def _paired(runs: pd.DataFrame, ends: _Ends) -> list[Contrast]:
    """Compare the end with the middle, seed by seed; cuts and repeats of a seed are averaged."""
    known = runs[np.isfinite(runs["value"].to_numpy(dtype=float))]
    wide = known.groupby(["seed_block", _BATCH])["value"].mean().unstack(_BATCH)
    if not {ends.end, ends.middle} <= set(wide):
        return []
    differences = (wide[ends.end] - wide[ends.middle]).dropna()
    if differences.empty:
        return []
    ids = tuple(sorted(known.loc[known["seed_block"].isin(differences.index), "run_id"]))
    name = f"global batch {ends.end} against {ends.middle}"
    return [Contrast(name, differences.to_numpy(dtype=np.float64), ids)]


def _rises(context: Context, runs: pd.DataFrame) -> pd.Series[float]:
    """Return the largest rise of every run, over the samples that all completed ones saw.

    It is a share of the mean loss in the first window: near the end a loss may be so small that
    its own share would make every ripple large.
    """
    missing = pd.Series(np.nan, index=runs.index)
    rows = context.evidence.rows("steps", runs, ["samples", "loss"]).dropna()
    seen = rows.groupby("run")["samples"].max()
    horizon = seen[seen.index.isin(runs.index[runs["status"].eq("completed")])].min()
    windows = 0 if np.isnan(horizon) else min(_WINDOWS, int(horizon // runs[_BATCH].max()))
    if windows < 2:
        return missing
    # A step stands in the window of the middle of its samples.
    middle = rows["samples"] - rows["run"].map(runs[_BATCH]) / 2
    window = middle * windows // horizon
    inside = window < windows
    means = rows[inside].groupby(["run", window[inside]])["loss"].mean()
    rises: pd.Series[float] = means.groupby(level=0).agg(
        lambda own: largest_rise(own.to_numpy(dtype=np.float64))
    )
    first = means.groupby(level=0).first().mean()
    shares: pd.Series[float] = rises.reindex(runs.index) / float(first)
    return shares


def _more_often(diverged: pd.DataFrame, ends: _Ends) -> float:
    """One-sided p of Fisher's test that the end diverges more often than the middle."""
    if not {ends.end, ends.middle} <= set(diverged.index):
        return 1.0
    counts = diverged.loc[[ends.end, ends.middle]].to_numpy(dtype=int).tolist()
    (here, of_end), (there, of_middle) = counts
    if not here:
        return 1.0
    # It loads in a second, which reports of sweeps in which nothing diverged do not wait for.
    from scipy.stats import fisher_exact

    table = np.array([[here, of_end - here], [there, of_middle - there]])
    return float(fisher_exact(table, alternative="greater").pvalue)


def _diverges(
    diverged: pd.DataFrame, ends: _Ends, p: float, counts: str, run_ids: pd.Series[str]
) -> ClaimResult:
    """Return what divergence alone says, where no rise can be compared."""
    shares = diverged["sum"] / diverged["size"]
    effect = Estimate(
        float(shares[ends.end] - shares[ends.middle]),
        np.nan,
        np.nan,
        int(diverged["size"].min()),
        "",
        f"Fisher's exact test, p = {p:.2g}",
        f"difference of the share of seeds that diverged: global batch {ends.end} against "
        f"{ends.middle}",
        ends.note,
    )
    explanation = (
        f"No rise of the loss can be compared. Seeds that diverged: {counts} (Fisher's exact test, "
        f"p = {p:.2g}).{_beware(ends.note)}"
    )
    return ClaimResult(SUPPORTED, effect, tuple(sorted(set(run_ids))), explanation)


def _spreads(context: Context, runs: pd.DataFrame, ends: _Ends) -> str:
    loss = loss_of(context).reindex(runs.index)
    logs = logarithm(loss.where(np.isfinite(loss)))
    by_seed = logs.groupby([runs[_BATCH], runs["seed_block"]]).mean()
    sd = by_seed.groupby(level=0).std()
    if not {ends.end, ends.middle} <= set(sd.dropna().index):
        return ""
    return (
        f"Spread of the log final loss between seeds: {sd[ends.end]:.2g} at {ends.end}, "
        f"{sd[ends.middle]:.2g} at {ends.middle}."
    )


_Path = tuple[NDArray[np.float64], NDArray[np.float64]]


def _rows(context: Context, runs: pd.DataFrame) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Return steps and evaluations of every run, in the order of the runs."""
    steps = context.evidence.rows("steps", runs, ["samples", "loss"]).dropna()
    evals = context.evidence.rows("evals", runs, ["samples", "eval_loss"]).dropna()
    by_step, by_eval = dict(list(steps.groupby("run"))), dict(list(evals.groupby("run")))
    return [(by_step.get(n, steps.iloc[:0]), by_eval.get(n, evals.iloc[:0])) for n in runs.index]


def _path(steps: pd.DataFrame, evals: pd.DataFrame) -> _Path | None:
    """Return training and held-out loss of a run wherever both are known.

    The training loss at an evaluation is the mean over samples within half an interval of
    evaluations before and after: one side alone would lag, and more so where the loss falls fast.
    """
    steps, evals = steps.sort_values("samples"), evals.sort_values("samples")
    if len(steps) < 2 or len(evals) < 3:
        return None
    places = evals["samples"].to_numpy(dtype=np.float64)
    losses = steps["loss"].to_numpy(dtype=np.float64)
    half = float(np.median(np.diff(places))) / 2
    # The loss of a step is that of the weights before it: a larger batch looks further behind.
    seen = np.concatenate([[0.0], steps["samples"].to_numpy(dtype=np.float64)[:-1]])
    whole = (places >= half) & (places + half <= seen[-1])
    if whole.sum() < 2 or half <= 0:
        return None
    slices = np.diff(seen) * (losses[1:] + losses[:-1]) / 2
    area = np.concatenate([[0.0], np.cumsum(slices)])
    upper, lower = (np.interp(places[whole] + sign * half, seen, area) for sign in (1, -1))
    return (upper - lower) / (2 * half), evals["eval_loss"].to_numpy(dtype=np.float64)[whole]


def _beware(note: str | None) -> str:
    return f" Beware: {note}." if note else ""
