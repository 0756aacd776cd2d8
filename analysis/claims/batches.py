"""What claims about convergence rest on: targets, rises and gaps of global batches."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.claims.claim import Finding, Result, run_ids_of, size_of
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.rates import (
    BATCH,
    at_best_rates,
    comparable,
    loss_name,
    of_one_place,
    score_of,
    untuned,
)
from batchscape.analysis.claims.rules import CONTRADICTED, SUPPORTED
from batchscape.analysis.comparing.pairs import Contrast, contrasts_of, logarithm
from batchscape.analysis.estimates import FEWEST, Estimate
from batchscape.analysis.learning_rate.aim import STEPS

__all__ = [
    "RISE",
    "at_equal_training_loss",
    "held_out_at",
    "largest_rises",
    "of_rises",
    "of_times_to_target",
]

_WINDOWS = 20
"""Windows of equal samples over a training, in which the loss is averaged: the same samples for
every global batch, so that their noise is the same too."""
RISE = 0.02
"""A rise larger than the reference's by 2 % of the loss at the start counts as unstable: ours."""
_EPOCHS = 2.0
"""Before the data come around, training loss is a held-out loss, and there is no gap to widen."""
_FISHER = 0.025
"""Half of 5 %: the other half goes to the rise, whose 95 % interval ends at a one-sided 2.5 %."""
_APART = (
    "no two global batches were trained at one micro-batch on as many devices, where accumulation "
    "alone makes the batch; elsewhere a ratio of times is that of the cuts, too"
)
_BY_SAMPLES = (
    "in samples, for lack of valid times; all have the same micro-batch and devices, so that time "
    "is proportional to samples, but for what an update itself takes"
)


def of_times_to_target(context: Context) -> Result | Finding | None:
    """Time to a target of the largest global batch against the others, at one place.

    The target is the lowest that all runs at their best rates reached, else the highest.
    """
    reaches = context.reaches
    if reaches.empty or reaches[BATCH].nunique() < 2:
        return None
    is_reached = reaches["outcome"].eq("reached")
    needed = reaches["samples_to_target"].astype(float).where(is_reached)
    best = at_best_rates(reaches, needed.fillna(np.inf).rename(STEPS))
    by_all = best["outcome"].eq("reached").groupby(best["target_loss"].astype(float)).all()
    target = by_all.index[by_all].min() if by_all.any() else by_all.index.max()
    rows = best[best["target_loss"].eq(target)]
    samples = rows.assign(value=_log_or_bound(rows))
    place = of_one_place(samples)
    if place is None:
        # More runs of these cuts would decide no more.
        contrasts = _largest_against_others(samples)
        ids = run_ids_of(contrasts) or rows["run_id"]
        found = Finding.none(_APART, f"ratio of the time to a loss of {target:.4g}", ids)
        known = [contrast for contrast in contrasts if len(contrast.values)]
        if not known:
            return found
        most = size_of(max(known, key=lambda contrast: contrast.mean), "ratio")
        text = f"{found.explanation} Of samples, not of time, it is: {most}."
        return replace(found, explanation=text)
    times = logarithm(place.reindex(columns=["time_to_target_s"])["time_to_target_s"])
    times = times.where(place["outcome"].eq("reached") & place["timing_valid"].eq(True))
    # What arrived late or never would be left out of times.
    is_timed = times.notna().all()
    contrasts = _largest_against_others(place.assign(value=times) if is_timed else place)
    has_bounds = any(contrast.bounds_below for contrast in contrasts)
    of_what = "time" if is_timed else "samples"
    at_one = "" if is_timed else ", at one micro-batch"
    note = untuned(rows)
    facts = {
        "target": f"{target:.4g}",
        "how": "all at one micro-batch and number of devices" if is_timed else _BY_SAMPLES,
        "bounds": "Some runs did not reach it and count as lower bounds." if has_bounds else "",
        "beware": _beware(note),
    }
    definition = f"ratio of the {of_what} to a loss of {target:.4g}{at_one}"
    return Result({"most": contrasts}, facts, definition, note)


def of_rises(context: Context) -> Result | Finding | None:
    """Largest rise of the training loss, and what diverged, of the smallest and middle batch."""
    ends = _ends(context, largest=False)
    if ends is None:
        return None
    runs = ends.runs[ends.runs["status"].isin(["completed", "diverged"])]
    # Cuts and repeats of one seed diverge together: a seed counts once.
    of_seed = runs["status"].eq("diverged").groupby([runs[BATCH], runs["seed_block"]]).any()
    diverged = of_seed.groupby(level=0).agg(["sum", "size"])
    counts = ", ".join(f"{row['sum']} of {row['size']} at {b}" for b, row in diverged.iterrows())
    diverged = diverged.reindex([ends.end, ends.middle], fill_value=0)
    p = _more_often(diverged)
    rises = ends.compare(runs.assign(value=_rises(context, runs)))
    if p < _FISHER and not any(len(contrast.values) >= FEWEST for contrast in rises):
        return _diverged(ends, diverged, p, counts, runs)
    facts = {"p": f"{p:.2g}", "counts": counts, "beware": _beware(ends.note)}
    return Result(
        {"rise": rises},
        facts | {"windows": _WINDOWS, "spread": _spread(context, runs, ends)},
        note=ends.note,
        beside=f"; diverged: {counts}",
        shown=p < _FISHER,
        withheld=CONTRADICTED if diverged.loc[ends.end, "sum"] else None,
    )


def at_equal_training_loss(context: Context) -> Result | Finding | None:
    """Held-out loss at an equal training loss, largest global batch and middle one."""
    ends = _ends(context, largest=True)
    if ends is None:
        return None
    runs = ends.runs[ends.runs["status"].eq("completed")]
    # How often the least of the runs went over its training data.
    counts = runs[["samples", "train_samples"]].apply(pd.to_numeric).astype(float)
    epochs = float((counts["samples"] / counts["train_samples"]).min(skipna=False))
    reason, paths = context.no_margin, _paths(context, runs) if epochs >= _EPOCHS else []
    if not epochs >= _EPOCHS:
        shown = "an unknown number of times" if np.isnan(epochs) else f"{epochs:.2g} times"
        reason = (
            f"training went over its data {shown}; before it has come around "
            f"{_EPOCHS:g} times a training loss is a held-out loss, and generalisation is untested"
        )
    elif not paths or None in paths:
        reason = "some run has fewer than three evaluations to compare at an equal training loss"
    if reason:
        definition = "difference of held-out loss at an equal training loss"
        return Finding.none(reason, definition, runs["run_id"])
    known = [path for path in paths if path is not None]
    level = max(float(training.min()) for training, _ in known)
    gaps = ends.compare(runs.assign(value=[float(held[-1] - own[-1]) for own, held in known]))
    facts = {
        "level": f"{level:.4g}",
        "epochs": f"{epochs:.2g}",
        "gap": "; ".join(size_of(contrast, "difference") for contrast in gaps),
        "beware": _beware(ends.note),
    }
    held_out = runs.assign(value=[held_out_at(level, *path) for path in known])
    return Result({"loss": ends.compare(held_out)}, facts, note=ends.note)


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
    around = [below[0], max(below[0] - 1, 0)]
    return float(np.interp(level, training[around], held_out[around]))


def largest_rises(losses: pd.Series[float]) -> pd.Series[float]:
    """Return the largest rise of each run's loss above its lowest value so far.

    Parameters
    ----------
    losses : Series
        Indexed by run, and what else there is; in order of time.
    """
    rises: pd.Series[float] = (losses - losses.groupby(level=0).cummin()).groupby(level=0).max()
    return rises


class _Ends(NamedTuple):
    """The batch at an end of the range, the middle one, and their runs at their best rates."""

    end: int
    middle: int
    runs: pd.DataFrame

    @property
    def note(self) -> str | None:
        """What weakens the comparison."""
        return untuned(self.runs)

    def compare(self, runs: pd.DataFrame) -> list[Contrast]:
        """Compare the end with the middle, seed by seed; cuts of a seed are averaged."""
        pair = (self.end, self.middle)
        return contrasts_of(runs, BATCH, [], "seed_block", lambda _: [pair])


def _ends(context: Context, *, largest: bool) -> _Ends | None:
    runs = comparable(context.runs)
    if runs is None:
        return None
    best = at_best_rates(runs, score_of(context))
    batches = sorted(best[BATCH].unique(), reverse=largest)
    if len(batches) < 2:
        return None
    end, middle = int(batches[0]), int(batches[len(batches) // 2])
    return _Ends(end, middle, best[best[BATCH].isin([end, middle])])


def _largest_against_others(reaches: pd.DataFrame) -> list[Contrast]:
    """Compare the largest batch with each smaller one.

    Batches that share no seed are compared too, without a value: "no batch" holds only where all
    were looked at.
    """
    largest = reaches[BATCH].max()
    unreached = set(reaches.loc[reaches["outcome"].ne("reached"), BATCH])
    # A bound of the smaller batch would be one from above, which says nothing.
    known = reaches["value"].mask(reaches[BATCH].isin(unreached - {largest}))
    # Timing repeats share a trajectory: seeds are the pairs.
    contrasts = contrasts_of(
        reaches.assign(value=known),
        *(BATCH, [], "seed_block"),
        lambda batches: [(largest, batch) for batch in batches[:-1]],
    )
    return [replace(contrast, bounds_below=largest in unreached) for contrast in contrasts]


def _log_or_bound(reaches: pd.DataFrame) -> pd.Series[float]:
    """Return the logarithm of the samples a run needed, or of what it certainly exceeded."""
    value = reaches["samples_to_target"].astype(float).where(reaches["outcome"].eq("reached"))
    low = reaches.reindex(columns=["steps_low"])["steps_low"].astype(float) * reaches[BATCH]
    low = low.where(np.isfinite(low))
    # What diverged never reaches: it exceeds at least what the longest run of its batch did.
    longest = low.groupby(reaches[BATCH]).transform("max")
    return logarithm(value.fillna(low).fillna(longest))


def _rises(context: Context, runs: pd.DataFrame) -> pd.Series[float]:
    """Return the largest rise of every run, over the samples that all completed ones saw.

    It is a share of the mean loss in the first window: near the end a loss may be so small that
    its own share would make every ripple large.
    """
    rows = context.rows("steps", runs, ["samples", "loss"]).dropna()
    seen = rows.groupby("run")["samples"].max()
    horizon = seen[seen.index.isin(runs.index[runs["status"].eq("completed")])].min()
    windows = 0 if np.isnan(horizon) else min(_WINDOWS, int(horizon // runs[BATCH].max()))
    if windows < 2:
        return pd.Series(np.nan, index=runs.index)
    # A step stands in the window of the middle of its samples.
    middle = rows["samples"] - rows["run"].map(runs[BATCH]) / 2
    window = middle * windows // horizon
    inside = window < windows
    means = rows[inside].groupby(["run", window[inside]])["loss"].mean()
    first = means.groupby(level=0).first().mean()
    return largest_rises(means).reindex(runs.index) / float(first)


def _more_often(diverged: pd.DataFrame) -> float:
    """One-sided p of Fisher's test that the end, in the first row, diverges more often."""
    if not diverged["sum"].iloc[0]:
        return 1.0
    # It loads in a second, which reports of sweeps in which nothing diverged do not wait for.
    from scipy.stats import fisher_exact

    table = diverged.assign(size=diverged["size"] - diverged["sum"]).to_numpy(dtype=int)
    return float(fisher_exact(table, alternative="greater").pvalue)


def _diverged(
    ends: _Ends, diverged: pd.DataFrame, p: float, counts: str, runs: pd.DataFrame
) -> Finding:
    """Return what divergence alone says, where no rise can be compared."""
    end, middle = diverged["sum"] / diverged["size"]
    definition = (
        f"difference of the share of seeds that diverged: global batch {ends.end} against "
        f"{ends.middle}"
    )
    n, method = int(diverged["size"].min()), f"Fisher's exact test, p = {p:.2g}"
    effect = Estimate(end - middle, np.nan, np.nan, n, "", method, definition, ends.note)
    explanation = (
        f"No rise of the loss can be compared. Seeds that diverged: {counts} ({method})."
        f"{_beware(ends.note)}"
    )
    return Finding(SUPPORTED, effect, tuple(sorted(set(runs["run_id"]))), explanation)


def _spread(context: Context, runs: pd.DataFrame, ends: _Ends) -> str:
    loss = logarithm(context.figures[loss_name(context)]).reindex(runs.index)
    by_seed = loss.groupby([runs[BATCH], runs["seed_block"]]).mean()
    sd = by_seed.groupby(level=0).std().reindex([ends.end, ends.middle])
    said = ", ".join(f"{value:.2g} at {batch}" for batch, value in sd.dropna().items())
    return f"Spread of the log final loss between seeds: {said}." if said else ""


_Path = tuple[NDArray[np.float64], NDArray[np.float64]]


def _paths(context: Context, runs: pd.DataFrame) -> list[_Path | None]:
    """Return training and held-out loss of every run."""
    tables = (
        context.rows("steps", runs, ["samples", "loss"]),
        context.rows("evals", runs, ["samples", "eval_loss"]),
    )
    parts = [dict(iter(rows.dropna().groupby("run"))) for rows in tables]
    own = [[rows.get(run) for rows in parts] for run in runs.index]
    return [None if steps is None or evals is None else _path(steps, evals) for steps, evals in own]


def _path(steps: pd.DataFrame, evals: pd.DataFrame) -> _Path | None:
    """Return training and held-out loss of a run wherever both are known.

    The training loss at an evaluation is the mean over samples within half an interval of
    evaluations before and after: one side alone would lag, and more so where the loss falls fast.
    """
    (seen, losses), (places, held_out) = (
        rows.sort_values("samples").drop(columns="run").to_numpy(dtype=np.float64).T
        for rows in (steps, evals)
    )
    if len(losses) < 2 or len(places) < 3:
        return None
    half = float(np.median(np.diff(places))) / 2
    # The loss of a step is that of the weights before it: a larger batch looks further behind.
    seen = np.concatenate([[0.0], seen[:-1]])
    whole = (places >= half) & (places + half <= seen[-1])
    if whole.sum() < 2 or half <= 0:
        return None
    slices = np.diff(seen) * (losses[1:] + losses[:-1]) / 2
    area = np.concatenate([[0.0], np.cumsum(slices)])
    upper, lower = (np.interp(places[whole] + sign * half, seen, area) for sign in (1, -1))
    return (upper - lower) / (2 * half), held_out[whole]


def _beware(note: str | None) -> str:
    return f"Beware: {note}." if note else ""
