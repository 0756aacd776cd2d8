"""Results of claims about convergence: targets, rises and gaps of global batches."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.claims.claim import Judgement, Result, run_ids_of
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.rates import (
    BATCH,
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
from batchscape.analysis.learning_rate.choice import runs_at_best
from batchscape.analysis.numbers import MISSING
from batchscape.analysis.targets.censoring import samples_or_bound
from batchscape.analysis.targets.training import WINDOWS, at_equal_loss, largest_rises

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


def of_times_to_target(context: Context) -> Result | Judgement | None:
    """Time to a target of the largest global batch against the others, at one place.

    The target is the lowest that all runs at their best rates reached, else the highest.
    """
    reaches = context.reaches
    if reaches.empty or reaches[BATCH].nunique() < 2:
        return None
    is_reached = reaches["outcome"].eq("reached")
    needed = reaches["samples_to_target"].astype(float).where(is_reached)
    best = runs_at_best(reaches, needed.fillna(np.inf).rename(STEPS), "seed_block")
    by_all = best["outcome"].eq("reached").groupby(best["target_loss"].astype(float)).all()
    target = by_all.index[by_all].min() if by_all.any() else by_all.index.max()
    rows = best[best["target_loss"].eq(target)]
    samples = rows.assign(value=logarithm(samples_or_bound(rows)))
    place = of_one_place(samples)
    if place is None:
        # More runs of these cuts would decide no more.
        contrasts = _largest_against_others(samples)
        ids = run_ids_of(contrasts) or rows["run_id"]
        definition = f"ratio of the time to a loss of {target:.4g}"
        judgement = Judgement.undecided(_APART, definition, ids)
        with_pairs = [contrast for contrast in contrasts if len(contrast.values)]
        if not with_pairs:
            return judgement
        most = max(with_pairs, key=lambda contrast: contrast.mean).text("ratio")
        text = f"{judgement.explanation} Of samples, not of time, it is: {most}."
        return replace(judgement, explanation=text)
    times = logarithm(place.reindex(columns=["time_to_target_s"])["time_to_target_s"])
    times = times.where(place["outcome"].eq("reached") & place["timing_valid"].eq(True))
    # What arrived late or never would be left out of times.
    is_timed = times.notna().all()
    contrasts = _largest_against_others(place.assign(value=times) if is_timed else place)
    has_bounds = any(contrast.bounds_below for contrast in contrasts)
    quantity = "time" if is_timed else "samples"
    at_one = "" if is_timed else ", at one micro-batch"
    facts = {
        "target": f"{target:.4g}",
        "how": "all at one micro-batch and number of devices" if is_timed else _BY_SAMPLES,
        "bounds": "Some runs did not reach it and count as lower bounds." if has_bounds else "",
    }
    definition = f"ratio of the {quantity} to a loss of {target:.4g}{at_one}"
    return Result({"most": contrasts}, facts, definition, untuned(rows))


def of_rises(context: Context) -> Result | Judgement | None:
    """Largest rise of the training loss, and divergence, of the smallest and the middle batch."""
    ends = _ends(context, largest=False)
    if ends is None:
        return None
    runs = ends.runs[ends.runs["status"].isin(["completed", "diverged"])]
    # Cuts and repeats of one seed diverge together: a seed counts once.
    is_lost = runs["status"].eq("diverged").groupby([runs[BATCH], runs["seed_block"]]).any()
    diverged = is_lost.groupby(level=0).agg(["sum", "size"])
    counts = ", ".join(f"{row['sum']} of {row['size']} at {b}" for b, row in diverged.iterrows())
    diverged = diverged.reindex([ends.end, ends.middle], fill_value=0)
    p = 1.0
    if diverged["sum"].iloc[0]:
        # The import takes a second, for which a report without divergence need not wait.
        from scipy.stats import fisher_exact

        table = diverged.assign(size=diverged["size"] - diverged["sum"]).to_numpy(dtype=int)
        p = float(fisher_exact(table, alternative="greater").pvalue)
    steps, _ = context.curves(runs)
    completed = runs.index[runs["status"].eq("completed")]
    rises = ends.compare(runs.assign(value=largest_rises(steps, runs[BATCH], completed)))
    if p < _FISHER and not any(len(contrast.values) >= FEWEST for contrast in rises):
        return _judge_divergence(ends, diverged, p, counts, runs)
    losses = runs.join(logarithm(context.figures[loss_name(context)]).rename("log"))
    losses_of_seeds = losses.groupby([BATCH, "seed_block"])["log"].mean()
    sd = losses_of_seeds.groupby(level=0).std().dropna()
    spread = ", ".join(f"{value:.2g} at {batch}" for batch, value in sd.items()) or MISSING
    return Result(
        {"rise": rises},
        {"p": f"{p:.2g}", "counts": counts, "windows": WINDOWS, "spread": spread},
        note=ends.note,
        few_pairs_note=f"; diverged: {counts}",
        is_supported=p < _FISHER,
        withheld=CONTRADICTED if diverged.loc[ends.end, "sum"] else None,
    )


def at_equal_training_loss(context: Context) -> Result | Judgement | None:
    """Held-out loss at an equal training loss, largest global batch and middle one."""
    ends = _ends(context, largest=True)
    if ends is None:
        return None
    runs = ends.runs[ends.runs["status"].eq("completed")]
    # The run with the fewest passes over its training data counts.
    counts = runs[["samples", "train_samples"]].apply(pd.to_numeric).astype(float)
    epochs = float((counts["samples"] / counts["train_samples"]).min(skipna=False))
    (_, reason), level_and_losses = context.margin, None
    if not epochs >= _EPOCHS:
        times = "an unknown number of times" if np.isnan(epochs) else f"{epochs:.2g} times"
        reason = (
            f"training went over its data {times}; before it has come around "
            f"{_EPOCHS:g} times a training loss is a held-out loss, and generalisation is untested"
        )
    elif (level_and_losses := at_equal_loss(*context.curves(runs), runs.index)) is None:
        reason = "some run has fewer than three evaluations to compare at an equal training loss"
    if reason or level_and_losses is None:
        definition = "difference of held-out loss at an equal training loss"
        return Judgement.undecided(reason, definition, runs["run_id"])
    level, losses = level_and_losses
    gaps = ends.compare(runs.assign(value=losses["gap"]))
    facts = {
        "level": f"{level:.4g}",
        "epochs": f"{epochs:.2g}",
        "gap": "; ".join(contrast.text("difference") for contrast in gaps),
    }
    held_out = runs.assign(value=losses["held_out"])
    return Result({"loss": ends.compare(held_out)}, facts, note=ends.note)


class _Ends(NamedTuple):
    """The batch at an end of the range, the middle one, and their runs at their best rates."""

    end: int
    middle: int
    runs: pd.DataFrame
    note: str | None
    """Reason to doubt the comparison."""

    def compare(self, runs: pd.DataFrame) -> list[Contrast]:
        """Compare the end with the middle, seed by seed; cuts of a seed are averaged."""
        pair = (self.end, self.middle)
        value = runs["value"].astype(float)
        rows = runs.assign(value=value.where(np.isfinite(value)))
        return contrasts_of(rows, BATCH, [], "seed_block", lambda _: [pair])


def _ends(context: Context, *, largest: bool) -> _Ends | None:
    runs = comparable(context.runs)
    if runs is None:
        return None
    best = runs_at_best(runs, score_of(context), "seed_block")
    batches = sorted(best[BATCH].unique(), reverse=largest)
    if len(batches) < 2:
        return None
    end, middle = int(batches[0]), int(batches[len(batches) // 2])
    return _Ends(end, middle, best[best[BATCH].isin([end, middle])], untuned(best))


def _largest_against_others(reaches: pd.DataFrame) -> list[Contrast]:
    """Compare the largest batch with each smaller one, without a value where they share no seed."""
    largest = reaches[BATCH].max()
    unreached = set(reaches.loc[reaches["outcome"].ne("reached"), BATCH])
    # A bound of the smaller batch would be one from above, which says nothing.
    value = reaches["value"].mask(reaches[BATCH].isin(unreached - {largest}))
    # Timing repeats share a trajectory: seeds are the pairs.
    contrasts = contrasts_of(
        reaches.assign(value=value),
        *(BATCH, [], "seed_block"),
        lambda batches: [(largest, batch) for batch in batches[:-1]],
    )
    return [replace(contrast, bounds_below=largest in unreached) for contrast in contrasts]


def _judge_divergence(
    ends: _Ends, diverged: pd.DataFrame, p: float, counts: str, runs: pd.DataFrame
) -> Judgement:
    """Judge by divergence alone, where no rise can be compared."""
    end, middle = diverged["sum"] / diverged["size"]
    definition = (
        f"difference of the share of seeds that diverged: global batch {ends.end} against "
        f"{ends.middle}"
    )
    n, method = int(diverged["size"].min()), f"Fisher's exact test, p = {p:.2g}"
    effect = Estimate(end - middle, np.nan, np.nan, n, "", method, definition, ends.note)
    explanation = f"No rise of the loss can be compared. Seeds that diverged: {counts} ({method})."
    if ends.note:
        explanation += f" Beware: {ends.note}."
    return Judgement(SUPPORTED, effect, tuple(sorted(set(runs["run_id"]))), explanation)
