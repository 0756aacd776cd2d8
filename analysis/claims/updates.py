"""Results of claims about the update: differences of cuts, best learning rates, its variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from batchscape.analysis.branches.ramps import (
    against_first_batch,
    follows,
    late_against_early,
)
from batchscape.analysis.claims.claim import Judgement, Result, run_ids_of
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.rates import BATCH, comparable, loss_name, score_of
from batchscape.analysis.claims.rules import CONTRADICTED, OPEN, SUPPORTED
from batchscape.analysis.comparing.pairs import Contrast, contrasts_of, settings_text
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.estimates import FEWEST, LEVEL, Estimate, too_few
from batchscape.analysis.learning_rate.aim import final_losses, find_optima
from batchscape.analysis.learning_rate.choice import runs_at_best
from batchscape.analysis.learning_rate.exponent import exponent_of, is_bounded, left_out_reason
from batchscape.analysis.noise_scale.estimate import variance_exponents
from batchscape.errors import AnalysisError
from batchscape.record.noise_scale import has_no_noise_scale
from batchscape.text import list_text

LEAST = 0.1
"""An exponent below 0.1 is no growth: a batch 10 times larger would change things by 26 %. Ours."""
WITHIN = 2.0
"""Factor within which a noise scale tells a critical batch: the step between batches. Ours."""
_TABLE = [(1, 32, 1), (4, 8, 1), (2, 8, 2), (1, 8, 4)]
"""The cuts of 32 that the claim names."""


def of_cuts(context: Context) -> Result | Judgement | None:
    """Final losses of the cuts of one global batch."""
    result = _compare_cuts(context, _invariant(context.runs), [BATCH])
    if not isinstance(result, Result):
        return result
    contrasts = result.contrasts["cuts"]
    cuts = {cut for contrast in contrasts for cut in (contrast.level, contrast.base)}
    figures = context.figures[context.figures["run_id"].isin(run_ids_of(contrasts))]
    costs = figures.groupby([BATCH, *FACTORS])[["peak_allocated_gib", "step_time_s"]].mean()
    spans = (costs.groupby(BATCH).max() / costs.groupby(BATCH).min()).max()
    spans = spans.set_axis(["peak memory", "step time"]).dropna()
    differ = [f"{figure} by a factor of up to {span:.2f}" for figure, span in spans.items()]
    present = cuts.intersection(settings_text(FACTORS, cut) for cut in _TABLE)
    table = f"Of the four cuts of 32 in the claim's table, {len(present)} took part."
    if differ:
        table += f" Among them differ {list_text(differ, 'and')}."
    return replace(result, facts={**result.facts, "table": table})


def of_accumulated_batches(context: Context) -> Result | Judgement | None:
    """Final losses of cuts with accumulation against those without, on as many devices."""
    runs, within = _invariant(context.runs), [BATCH, FACTORS[0]]
    # Where accumulation of 1 was tried anywhere, a divergence counts wherever it was.
    is_tried = runs[FACTORS[2]].eq(1).any()
    return _compare_cuts(context, runs if is_tried else runs.iloc[:0], within, of_one=True)


def _invariant(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that ended, and whose objective does not depend on the cut."""
    depends = runs["not_invariant"].astype(object).fillna("").astype(bool)
    return runs[~depends & runs["status"].isin(["completed", "diverged"])]


def _compare_cuts(
    context: Context, runs: pd.DataFrame, within: list[str], *, of_one: bool = False
) -> Result | Judgement | None:
    """Compare all cuts that agree in some columns; `of_one` only with one without accumulation."""
    contrasts = _cut_contrasts(context, runs, within, of_one=of_one)
    labels = [why for why in context.figures["not_invariant"] if isinstance(why, str) and why]
    why = "; ".join(sorted(set(labels)))
    left_out = f"{len(labels)} runs are left out, whose objective itself depends on the cut ({why})"
    # Of any two cuts: the one that all are compared with may have failed, or diverged as well.
    outcomes = runs.groupby([*within, "trajectory_id"])["status"].nunique()
    alone = int(outcomes.gt(1).sum())
    diverged = (
        f"{alone} of {len(outcomes)} trajectories diverged under one cut and not under another"
    )
    left_out_texts = {"left_out": left_out if why else "", "diverged": diverged if alone else ""}
    if not contrasts:
        definition = "difference of final loss between two cuts"
        reason = ". ".join(filter(None, left_out_texts.values()))
        return Judgement.undecided(reason, definition, context.runs["run_id"]) if reason else None
    return Result(
        {"cuts": contrasts},
        {name: f"{words}." if words else "" for name, words in left_out_texts.items()},
        reason=context.margin[1],
        withheld=SUPPORTED if alone else None,
    )


def _cut_contrasts(
    context: Context, runs: pd.DataFrame, within: list[str], *, of_one: bool
) -> list[Contrast]:
    """Compare final losses with those of the cut on least devices, then of least accumulation."""
    losses = context.figures[loss_name(context)].astype(float).rename("value")
    rows = runs.join(losses[np.isfinite(losses)], how="inner").dropna(subset=["trajectory_id"])
    rows = rows.sort_values([FACTORS[0], FACTORS[2], FACTORS[1]], kind="stable")
    # Texts, as a table with tuples for columns would have three levels of them.
    rows["cut"] = [settings_text(FACTORS, cut) for cut in rows[[*FACTORS]].to_numpy()]
    steps = rows.set_index("cut")[FACTORS[2]].to_dict()
    order = list(steps)

    def to_first(cuts: Sequence[str]) -> list[tuple[str, str]]:
        first, *others = sorted(cuts, key=order.index)
        return [] if of_one and steps[first] > 1 else [(cut, first) for cut in others]

    contrasts = contrasts_of(rows, "cut", within, "trajectory_id", to_first)
    return [contrast for contrast in contrasts if len(contrast.values)]


def of_best_rates(context: Context) -> Judgement | None:
    """The exponent of the best learning rate in the global batch, as the report gives it."""
    runs, reaches = comparable(context.runs), context.reaches
    if runs is None:
        return None
    if not reaches.empty:
        reaches = reaches.merge(runs[["sweep_dir", "run_id"]])
        reaches = reaches.assign(seed=reaches["seed_block"])
    figures = context.launched.loc[runs.index].assign(learning_rate=runs["learning_rate"])
    try:
        optima = find_optima(reaches, final_losses(figures))
    except AnalysisError as error:
        definition = "exponent of the best learning rate"
        return Judgement.undecided(str(error).rstrip("."), definition, context.runs["run_id"])
    if optima is None:
        return None
    counts = optima.best.groupby("group")["learning_rate"].transform("count")
    group = optima.best["group"].iloc[int(counts.to_numpy().argmax())]
    best, run_rows = (
        rows[rows["group"].eq(group)] if "group" in rows else rows
        for rows in (optima.best, optima.table)
    )
    exponent, bounded = exponent_of(best), is_bounded(best)
    optima_in_fit = best[bounded]
    if bounded.any():
        run_rows = run_rows[run_rows[BATCH].isin(optima_in_fit[BATCH])]
    ids = tuple(sorted(set(run_rows["run_id"])))
    out = [left_out_reason(row) for _, row in best[~bounded].iterrows()]
    left_out = f" Left out: B = {'; B = '.join(out)}." if out else ""
    if not exponent.is_identified:
        return Judgement(OPEN, exponent, ids, f"{str(exponent.note).capitalize()}.{left_out}")
    # Seeds of one sweep that every global batch was trained with.
    keys = ["sweep_dir", "run_id"]
    seeds = run_rows[[*keys, BATCH]].merge(context.runs[[*keys, "seed_block"]], on=keys)
    batches_of_seed = seeds.groupby("seed_block")[BATCH].nunique()
    shared = int(batches_of_seed.eq(seeds[BATCH].nunique()).sum())
    if np.isnan(exponent.low) or shared < FEWEST:
        seed_count_text = too_few(
            shared, "seeds of one sweep that all of these global batches have"
        )
        reason = str(exponent.note) if np.isnan(exponent.low) else seed_count_text
        return Judgement.undecided(reason, exponent.definition, ids)
    low, high = exponent.low, exponent.high
    answer = SUPPORTED if low > LEAST else CONTRADICTED if high < LEAST else OPEN
    linear, root = ("" if low <= power <= high else "not " for power in (1.0, 0.5))
    # What weakens the optima behind it, each thing once.
    batches = optima_in_fit[BATCH].map("{:g}".format).groupby(optima_in_fit["note"]).agg(", ".join)
    notes = "; ".join(f"B = {names}: {note}" for note, names in batches.items()) or None
    explanation = (
        f"Exponent {exponent.text(2)} over {exponent.n} global batches, as in the report on "
        f"learning rates; growth means more than {LEAST:g}. The linear rule (1) is {linear}within "
        f"the interval; the square root rule (0.5) is {root}within the interval."
        f"{f' {notes}.' if notes else ''}{left_out}"
    )
    effect = replace(exponent, note=notes)
    return Judgement(answer, effect, ids, explanation, n_seeds=int(optima_in_fit["n"].max()))


def of_variance(context: Context) -> Result | None:
    """The exponent, in the global batch, of the variance of the gradient norm between steps."""
    runs = context.figures[~context.figures["not_invariant"].map(has_no_noise_scale).astype(bool)]
    # A learning rate that hardly trains stays where gradients are noisy: the best ones compare.
    runs = runs_at_best(runs, score_of(context), "seed_block")
    steps, _ = context.curves(runs)
    contrast = variance_exponents(runs, steps, "seed_block")
    if contrast is None:
        return None
    low, high = contrast.interval(LEVEL)
    return Result({"slope": [contrast]}, {"inside": "" if low <= -1 <= high else "not "})


def of_noise_scale(context: Context) -> Judgement | None:
    """Critical batches by branches over the gradient noise scale in the same windows."""
    ages = context.ages
    if ages.empty:
        return None
    ids = tuple(sorted({*" ".join(ages["run_ids"]).split()}))
    definition = "ratio of the critical batch by branches to the gradient noise scale"
    ratios = ages.assign(
        value=ages["estimate"] / ages["noise_estimate"],
        low=ages["low"] / ages["noise_high"],
        high=ages["high"] / ages["noise_low"],
    ).dropna(subset=["low", "high"])
    if ratios.empty:
        few = too_few(int(ages["n"].max()), "seeds")
        return Judgement.undecided(few, definition, ids, is_compared=True)
    is_outside = ratios["low"].gt(WITHIN) | ratios["high"].lt(1 / WITHIN)
    # An age at which the interval lies outside, else the one at which it reaches farthest.
    reach = ratios[["high"]].assign(low=1 / ratios["low"]).max(axis=1)
    chosen = is_outside if is_outside.any() else ratios["value"].notna()
    deciding = ratios.iloc[int(reach.where(chosen, 0.0).to_numpy().argmax())]
    value, low, high = (float(deciding[name]) for name in ("value", "low", "high"))
    effect = Estimate(
        value, low, high, int(deciding["n"]), "", "ends of both 95 % intervals", definition
    )
    says = (
        f"Of {len(ages)} ages, that after {deciding['age_samples']} samples decides: the ratio is "
        f"{effect.text()}; as large means within a factor of {WITHIN:g}. Its ends are those of "
        "both intervals: wider than 95 %, in place of a correction for several ages."
    )
    is_supported = reach.le(WITHIN).all() and len(ratios) == len(ages)
    everywhere = SUPPORTED if is_supported else OPEN
    answer = CONTRADICTED if is_outside.any() else everywhere
    return Judgement(answer, effect, ids, says, is_compared=True)


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
