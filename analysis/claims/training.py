"""What claims take from topics on training: targets, rises, cuts, learning rates, branches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.branches.ramps import against_first_batch, follows, late_against_early
from batchscape.analysis.cells import geometry_label
from batchscape.analysis.claims.claim import Result
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.comparing.pairs import Contrast, contrasts_of, logarithm
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.equivalence.paired import paired_differences
from batchscape.analysis.estimates import LEVEL, NOT_IDENTIFIED, Estimate
from batchscape.analysis.learning_rate.exponent import exponent_of, is_bounded, rules_text
from batchscape.analysis.noise_scale.estimate import variance_exponents
from batchscape.analysis.targets.censoring import samples_or_bound
from batchscape.analysis.targets.training import WINDOWS, at_equal_loss, largest_rises
from batchscape.record.noise_scale import objective_depends_on_batch

LEAST = 0.1
"""An exponent below 0.1 is no growth: a batch 10 times larger would change things by 26 %. Ours."""
RISE = 0.02
"""A rise larger than the reference's by 2 % of the loss at the start counts as unstable: ours."""
LOST = 1.0
"""The least rise of a run that diverged: it lost the whole of its loss at the start. Ours."""
_BATCH = "global_batch_size"
_EPOCHS = 2.0
"""Before the data come around, training loss is a held-out loss, and there is no gap to widen."""
_BY_SAMPLES = (
    "in samples, for lack of valid times; all have the same micro-batch and devices, so that time "
    "is proportional to samples, but for what an update itself takes"
)


def of_times_to_target(context: Context) -> Result | None:
    """Time to a target of the largest global batch against the others, at one place.

    The target is the lowest that all runs at their best rates reached, else the highest.
    """
    best = context.at_best(context.reaches)
    if best.empty:
        return None
    by_all = best["outcome"].eq("reached").groupby(best["target_loss"].astype(float)).all()
    target = by_all.index[by_all].min() if by_all.any() else by_all.index.max()
    rows = best[best["target_loss"].eq(target)]
    # The place of most batches, which differ in accumulation alone there.
    places = rows.groupby([*FACTORS[:2]])[_BATCH]
    rows = rows[places.ngroup().eq(places.nunique().argmax())]
    if rows[_BATCH].nunique() < 2:
        return None
    times = logarithm(rows.reindex(columns=["time_to_target_s"])["time_to_target_s"])
    times = times.where(rows["outcome"].eq("reached") & rows["timing_valid"].eq(True))
    # What arrived late or never would be left out of times.
    is_timed = times.notna().all()
    values = times if is_timed else logarithm(samples_or_bound(rows))
    largest = rows[_BATCH].max()
    unreached = set(rows.loc[rows["outcome"].ne("reached"), _BATCH])
    # A bound of a smaller batch would be one from above, which says nothing.
    values = values.mask(rows[_BATCH].isin(unreached - {largest}))
    # Timing repeats share a trajectory: seeds are the pairs.
    pairs = contrasts_of(
        rows.assign(value=values),
        *(_BATCH, [], "seed_block"),
        lambda batches: [(largest, batch) for batch in batches[:-1]],
    )
    is_bound = largest in unreached
    facts = {
        "target": f"{target:.4g}",
        "how": "all at one micro-batch and number of devices" if is_timed else _BY_SAMPLES,
        "bounds": "Some runs did not reach it and count as lower bounds." if is_bound else "",
    }
    facts["quantity"], facts["at"] = (
        ("time", "") if is_timed else ("samples", ", at one micro-batch")
    )
    contrasts = [replace(pair, bounds_below=is_bound) for pair in pairs]
    return Result({"most": contrasts}, facts, _untuned(rows))


def of_rises(context: Context) -> Result | None:
    """Largest rise of the training loss, of the smallest batch and the middle one."""
    ends = _ends(context, largest=False)
    if ends is None:
        return None
    runs = ends.runs[ends.runs["status"].isin(["completed", "diverged"])]
    is_lost = runs["status"].eq("diverged")
    rises = largest_rises(context.curves(runs)[0], runs[_BATCH], runs.index[~is_lost])
    # No rise is larger than that of a run that diverged; of two such runs none is.
    rises = rises.mask(is_lost, max(LOST, rises.max()))
    lost_seeds = is_lost.groupby([runs[_BATCH], runs["seed_block"]]).any()
    is_lost_twice = runs["seed_block"].map(lost_seeds.groupby(level=1).sum()).gt(1)
    seeds = lost_seeds.groupby(level=0)
    counts = ", ".join(f"{lost.sum()} of {len(lost)} at {batch}" for batch, lost in seeds)
    is_bound = bool(is_lost[runs[_BATCH].eq(ends.end)].any())
    contrasts = [
        replace(contrast, bounds_below=is_bound)
        for contrast in ends.compare(runs.assign(value=rises.mask(is_lost_twice)))
    ]
    sizes = [_without_ends(contrast, runs[is_lost], counts, ends.note) for contrast in contrasts]
    facts = {"counts": counts, "windows": WINDOWS}
    return Result({"rise": [*contrasts, *sizes]}, facts, note=ends.note)


def _without_ends(
    contrast: Contrast, lost: pd.DataFrame, counts: str, note: str | None
) -> Contrast:
    """Give the mean no interval where runs that diverged, all of one rise, have a part in it."""
    if lost["run_id"].isin(contrast.run_ids).sum() == 0:
        return contrast
    method = f"no interval; diverged: {counts}"
    size = Estimate(contrast.mean, math.nan, math.nan, len(contrast.values), "", method, "", note)
    return replace(contrast, size=size)


def at_equal_training_loss(context: Context) -> Result | None:
    """Held-out loss at an equal training loss, largest global batch and middle one."""
    ends = _ends(context, largest=True)
    if ends is None:
        return None
    runs = ends.runs[ends.runs["status"].eq("completed")]
    # The run with the fewest passes over its training data counts.
    counts = runs[["samples", "train_samples"]].apply(pd.to_numeric).astype(float)
    epochs = float((counts["samples"] / counts["train_samples"]).min(skipna=False))
    level_and_losses = at_equal_loss(*context.curves(runs), runs.index)
    level, held_out = level_and_losses or (math.nan, pd.Series(math.nan, runs.index))
    reason = context.margin[1]
    if not epochs >= _EPOCHS:
        times = "an unknown number of times" if math.isnan(epochs) else f"{epochs:.2g} times"
        reason = (
            f"training went over its data {times}; before it has come around "
            f"{_EPOCHS:g} times a training loss is a held-out loss, and generalisation is untested"
        )
    elif level_and_losses is None:
        reason = "some run has fewer than three evaluations to compare at an equal training loss"
    contrasts = ends.compare(runs.assign(value=held_out))
    facts = {"level": f"{level:.4g}", "epochs": f"{epochs:.2g}"}
    return Result({"loss": contrasts}, facts, note=ends.note, reason=reason)


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
        return contrasts_of(rows, _BATCH, [], "seed_block", lambda _: [pair])


def _ends(context: Context, *, largest: bool) -> _Ends | None:
    best = context.at_best(context.runs)
    batches = sorted(best[_BATCH].unique(), reverse=largest)
    if len(batches) < 2:
        return None
    end, middle = int(batches[0]), int(batches[len(batches) // 2])
    return _Ends(end, middle, best[best[_BATCH].isin([end, middle])], _untuned(best))


def _untuned(runs: pd.DataFrame) -> str | None:
    """Say that learning rates were not tuned; None where they were for every batch."""
    return None if runs["tuned"].all() else "learning rates were not tuned for each global batch"


def of_cuts(
    *equal: str, from_accumulation: int | None = None
) -> Callable[[Context], Result | None]:
    """Final losses of cuts equal in some columns against the first, as the report pairs them.

    None: there is nothing to compare and nothing to say. `from_accumulation` is that of the first.
    """

    def result(context: Context) -> Result | None:
        is_invariant = ~context.runs["not_invariant"].astype(object).fillna("").astype(bool)
        runs, cells = context.runs[is_invariant], context.cells
        if runs.empty:
            return None
        # The first cut of each place is the reference of all others there.
        places = [replace(cells, runs=part) for _, part in runs.groupby(list(equal))]
        pairs = pd.concat([paired_differences(place) for place in places], ignore_index=True)
        has_held_out = context.figures["final_eval_loss"].notna().all()
        pairs = pairs[pairs["quantity"].eq("final_eval_loss" if has_held_out else "final_loss")]
        pairs = pairs[np.isfinite(pairs["difference"])]
        if from_accumulation is not None:
            first = pairs["reference"].map(cells.table[FACTORS[2]])
            pairs = pairs[first.eq(from_accumulation)]
        labels = geometry_label(cells.table)
        contrasts = [
            Contrast(
                f"{labels[cell]} against {labels[reference]}",
                rows["difference"].to_numpy(dtype=float),
                tuple(sorted({*rows["run_id"], *rows["run_id_reference"]})),
            )
            for (cell, reference), rows in pairs.groupby(["cell", "reference"])
        ]
        # Of any two cuts: the one that all are compared with may have failed, or diverged as well.
        ended_runs = runs[runs["status"].isin(["completed", "diverged"])]
        outcomes = ended_runs.groupby([*equal, "trajectory_id"])["status"].nunique()
        n_diverged = int(outcomes.gt(1).sum())
        reason = context.margin[1]
        if n_diverged:
            reason = (
                f"{n_diverged} of {len(outcomes)} trajectories diverged under one cut and not "
                "under another"
            )
        return Result({"cuts": contrasts}, reason=reason) if contrasts or n_diverged else None

    return result


def of_best_rates(context: Context) -> Result | None:
    """The exponent of the best learning rate in the global batch, as the report gives it."""
    if context.optima is None:
        return None
    table, _, best = context.optima
    best = best[best["group"].eq(best["group"].mode().iloc[0])]
    exponent = exponent_of(best)
    batches = best.loc[is_bounded(best), _BATCH]
    ids = table.loc[table[_BATCH].isin(batches), "run_id"]
    contrast = Contrast.of_estimate(f"{exponent.n} global batches", exponent, ids)
    reason = str(exponent.note).removeprefix(f"{NOT_IDENTIFIED}: ")
    return Result(
        {"exponent": [contrast]},
        {"rules": rules_text(exponent)},
        reason=reason if math.isnan(exponent.low) else "",
    )


def of_variance(context: Context) -> Result | None:
    """The exponent, in the global batch, of the variance of the gradient norm between steps."""
    runs = context.figures[
        ~context.figures["not_invariant"].map(objective_depends_on_batch).astype(bool)
    ]
    # A learning rate that hardly trains stays where gradients are noisy: the best ones compare.
    runs = context.at_best(runs)
    contrast = variance_exponents(runs, context.curves(runs)[0], "seed_block")
    if contrast is None:
        return None
    low, high = contrast.interval(LEVEL)
    return Result({"slope": [contrast]}, {"inside": "" if low <= -1 <= high else "not "})


def of_noise_scale(context: Context) -> Result | None:
    """Critical batches by branches over the gradient noise scale in the same windows."""
    if context.ages.empty:
        return None
    # Columns: a noise scale may be 0, by which a number is infinitely larger.
    ages = context.ages.assign(
        value=lambda ages: ages["estimate"] / ages["noise_estimate"],
        from_low=lambda ages: ages["low"] / ages["noise_high"],
        to_high=lambda ages: ages["high"] / ages["noise_low"],
    )
    ratios = []
    # Of ages that leave it open alike one with a value decides.
    for _, row in ages.sort_values("estimate", key=pd.isna, kind="stable").iterrows():
        method = "ends of both 95 % intervals"
        ends = row["value"], row["from_low"], row["to_high"]
        ratio = Estimate(*ends, int(row["n"]), "", method, "")
        name, ids = f"an age of {row['age_samples']} samples", row["run_ids"].split()
        ratios.append(Contrast.of_estimate(name, ratio, ids))
    return Result({"ages": ratios})


def of_growing_batches(context: Context) -> Result | None:
    """Final losses of ramps that stay within the critical batch against the small batch."""
    following = {
        run["batches"] for _, run in context.ramps.iterrows() if follows(run, context.ages)
    }
    kept = [each for each in against_first_batch(context.ramps) if each.level in following]
    return Result({"ramps": kept}, reason=context.margin[1]) if kept else None


def of_late_switching(context: Context) -> Result | None:
    """Final losses of ramps that climb late against equal ones that climb early."""
    contrasts = late_against_early(context.ramps)
    return Result({"switches": contrasts}) if contrasts else None
