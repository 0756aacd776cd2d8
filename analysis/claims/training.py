"""Claims about convergence: fewer updates, and decompositions of one global batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from batchscape.analysis.claims.claim import ClaimResult, found, nothing, undecided
from batchscape.analysis.claims.contrasts import (
    EQUIVALENCE_FEWEST,
    OPEN,
    SUPPORTED,
    Answer,
    Contrast,
    all_within,
    any_all_above,
    of_one_place,
    run_ids_of,
    said,
)
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.rates import best_rates, loss_of
from batchscape.analysis.comparing.pairs import logarithm
from batchscape.analysis.learning_rate.aim import STEPS
from batchscape.text import list_text

__all__ = [
    "accumulation_equals_large_batch",
    "decompositions_are_equivalent",
    "fewer_updates_slower_convergence",
]

_SLOWER = np.log(1.05)
"""Five percent is the least that counts as slower: ours."""
_APART = (
    "no two global batches were trained at one micro-batch on as many devices, where accumulation "
    "alone makes the batch; elsewhere a ratio of times is that of the cuts, too"
)
_BATCH = "global_batch_size"
_CUT = ["data_parallel_size", "gradient_accumulation_steps", "micro_batch_size"]


def fewer_updates_slower_convergence(context: Context) -> ClaimResult | None:
    """The largest global batch takes longer than some smaller one to reach a target loss."""
    if context.reaches.empty or context.reaches[_BATCH].nunique() < 2:
        return None
    target, reaches, note = _at_one_target(context.reaches)
    definition = f"ratio of the time to a loss of {target:.4g}"
    measured, how = _timed(reaches), "all at one micro-batch and number of devices"
    if measured is None:
        measured = of_one_place(reaches.assign(value=_log_or_bound(reaches)))
        if measured is None:
            return _by_samples_alone(reaches, definition)
        definition = f"ratio of the samples to a loss of {target:.4g}, at one micro-batch"
        how = (
            "in samples, for lack of valid times; all have the same micro-batch and devices, so "
            "that time is proportional to samples, but for what an update itself takes"
        )
    contrasts = _largest_against_others(measured)
    decision = any_all_above([[contrast] for contrast in contrasts], _SLOWER)
    if decision is None:
        reason = None if contrasts else f"the loss of {target:.4g} was hardly reached"
        return undecided(contrasts, definition, reason)
    bound = (
        " Some runs did not reach it and count as lower bounds."
        if (decision.deciding.bounds_below)
        else ""
    )
    explanation = (
        f"Largest against the smaller global batches at a loss of {target:.4g}, {how}, "
        f"{len(contrasts)} comparisons; most: {said(decision.deciding, 'ratio')}; slower means "
        f"by more than 5 %.{bound}"
        f"{' Beware: ' + note + '.' if note else ''}"
    )
    return found(
        decision.answer,
        decision.deciding,
        contrasts,
        explanation,
        definition,
        ratio=True,
        note=note,
    )


def decompositions_are_equivalent(context: Context) -> ClaimResult | None:
    """All cuts of one global batch end at the same loss, run by run, within the margin."""
    figures, left_out = _losses(context)
    contrasts = _cuts(figures, [])
    cuts = figures[figures["run_id"].isin(run_ids_of(contrasts))][_CUT].drop_duplicates()
    fork = {(1, 1, 32), (4, 1, 8), (2, 2, 8), (1, 4, 8)}
    present = len(fork & set(cuts.itertuples(index=False, name=None)))
    return _alike(
        context,
        contrasts,
        "difference of final loss between two cuts of one trajectory",
        within=[],
        left_out=left_out,
        more=f" Of the four cuts of 32 in the claim's table, {present} took part. "
        f"{_costs(context, contrasts)}",
    )


def accumulation_equals_large_batch(context: Context) -> ClaimResult | None:
    """Accumulation over A micro-batches ends at the loss of one that is A times larger."""
    figures, left_out = _losses(context)
    least = figures.groupby([_BATCH, "data_parallel_size"])["gradient_accumulation_steps"]
    return _alike(
        context,
        _cuts(figures[least.transform("min").eq(1)], ["data_parallel_size"]),
        "difference of final loss between accumulation and one large micro-batch",
        within=["data_parallel_size"],
        left_out=left_out,
    )


def _alike(
    context: Context,
    contrasts: list[Contrast],
    definition: str,
    *,
    within: list[str],
    left_out: str,
    more: str = "",
) -> ClaimResult | None:
    """Judge whether all pairs of cuts that agree in `within` end at the same loss."""
    if not contrasts:
        return nothing(left_out, definition, context.runs["run_id"]) if left_out else None
    if context.margin is None:
        return undecided(contrasts, definition, context.no_margin)
    decision = all_within(contrasts, context.margin, fewest=EQUIVALENCE_FEWEST)
    if decision is None:
        return undecided(contrasts, definition, fewest=EQUIVALENCE_FEWEST)
    also = f" {left_out}." if left_out else ""
    answer, alone = _unless_one_diverged(decision.answer, context, within)
    explanation = (
        f"Farthest of {len(contrasts)}: {said(decision.deciding, 'difference')}; alike means that "
        f"every 90 % interval lies within {context.margin:g} nats.{more}{also}{alone}"
    )
    return found(
        answer,
        decision.deciding,
        contrasts,
        explanation,
        definition,
        ratio=False,
        unit="nats",
        fewest=EQUIVALENCE_FEWEST,
    )


def _at_one_target(reaches: pd.DataFrame) -> tuple[float, pd.DataFrame, str | None]:
    """Choose the lowest target that all runs at their best rates reached, else the highest."""
    chosen = {}
    for target in reaches["target_loss"].astype(float).unique().tolist():
        own = reaches[reaches["target_loss"].eq(target)]
        samples = own["samples_to_target"].astype(float)
        needed = samples.where(own["outcome"].eq("reached"), np.inf)
        chosen[target] = best_rates(own, needed.rename(STEPS))
    reached = [t for t, pick in chosen.items() if pick.runs["outcome"].eq("reached").all()]
    target = min(reached, default=max(chosen))
    return target, chosen[target].runs, chosen[target].note


def _timed(reaches: pd.DataFrame) -> pd.DataFrame | None:
    """Return valid times to the target, at the micro-batch and devices that most batches share.

    None where no two batches share any, or where a run there has none: what arrived late or never
    would be left out.
    """
    if "time_to_target_s" not in reaches:
        return None
    value = logarithm(reaches["time_to_target_s"]).where(reaches["outcome"].eq("reached"))
    valid = reaches["timing_valid"].fillna(False).astype(bool)
    rows = of_one_place(reaches.assign(value=value.where(valid)))
    return None if rows is None or rows["value"].isna().any() else rows


def _by_samples_alone(reaches: pd.DataFrame, definition: str) -> ClaimResult:
    """Give the ratio of samples as such, which does not decide about time."""
    contrasts = _largest_against_others(reaches.assign(value=_log_or_bound(reaches)))
    # More runs of these cuts would decide no more, so that no contrast is handed on.
    finding = nothing(_APART, definition, run_ids_of(contrasts) or reaches["run_id"])
    known = [contrast for contrast in contrasts if len(contrast.values)]
    if not known:
        return finding
    most = max(known, key=lambda contrast: contrast.mean)
    text = f" Of samples, not of time, it is: {said(most, 'ratio')}."
    return replace(finding, explanation=finding.explanation + text)


def _log_or_bound(reaches: pd.DataFrame) -> pd.Series[float]:
    """Return the logarithm of the samples a run needed, or of what it certainly exceeded."""
    value = reaches["samples_to_target"].astype(float).where(reaches["outcome"].eq("reached"))
    if "steps_low" in reaches:
        low = reaches["steps_low"].astype(float) * reaches[_BATCH]
        low = low.where(np.isfinite(low))
        # What diverged never reaches: it exceeds at least what the longest run of its batch did.
        longest = low.groupby(reaches[_BATCH]).transform("max")
        value = value.fillna(low).fillna(longest)
    return logarithm(value)


def _largest_against_others(reaches: pd.DataFrame) -> list[Contrast]:
    """Compare the largest batch with each smaller one.

    Batches that share no seed are compared too, without a value: "no batch" holds only where all
    were looked at.
    """
    # Timing repeats share a trajectory: seeds are the pairs.
    wide = reaches["value"].groupby([reaches["seed_block"], reaches[_BATCH]]).mean().unstack()
    unreached = set(reaches.loc[reaches["outcome"].ne("reached"), _BATCH])
    *smaller, largest = sorted(wide.columns)
    contrasts = []
    for batch in smaller:
        # A bound of the smaller batch would be one from above, which says nothing.
        differences = (wide[largest] - wide[batch]).dropna()
        if batch in unreached:
            differences = differences.iloc[:0]
        ids = reaches.loc[reaches[_BATCH].isin([batch, largest]), "run_id"]
        contrasts.append(
            Contrast(
                f"global batch {largest} against {batch}",
                differences.to_numpy(dtype=np.float64),
                tuple(sorted(set(ids))),
                bounds_below=largest in unreached,
            )
        )
    return contrasts


def _losses(context: Context) -> tuple[pd.DataFrame, str]:
    """Return the figures with the final loss as `value`, and what was left out of them."""
    loss = loss_of(context).reindex(context.figures.index)
    figures = context.figures.assign(value=loss.where(np.isfinite(loss)))
    labels = figures.loc[_depends_on_cut(figures), "not_invariant"]
    if labels.empty:
        return figures, ""
    why = "; ".join(sorted(set(map(str, labels))))
    return figures.drop(index=labels.index), (
        f"{len(labels)} runs are left out, whose objective itself depends on the cut ({why})"
    )


def _depends_on_cut(runs: pd.DataFrame) -> pd.Series[bool]:
    return runs["not_invariant"].map(lambda why: isinstance(why, str) and why != "").astype(bool)


def _cuts(figures: pd.DataFrame, fixed: list[str]) -> list[Contrast]:
    """Pair every cut with the first of its global batch, on the same trajectories."""
    columns = [_BATCH, *fixed, *_CUT, "trajectory_id", "run_id", "value"]
    known = figures[list(dict.fromkeys(columns))].dropna(subset=["value", "trajectory_id"])
    known = known.astype({"trajectory_id": object, "run_id": object})
    known["cut"] = list(zip(*(known[name] for name in _CUT), strict=True))
    contrasts = []
    for key, own in known.groupby([_BATCH, *fixed]):
        cuts = own[_CUT].drop_duplicates().sort_values(_CUT).itertuples(index=False, name=None)
        first, *others = list(cuts)
        wide = own.groupby(["trajectory_id", *_CUT])["value"].mean().unstack(_CUT)
        for cut in others:
            differences = (wide[cut] - wide[first]).dropna()
            if differences.empty:
                continue
            used = own[own["trajectory_id"].isin(differences.index)]
            ids = used.loc[used["cut"].isin([cut, first]), "run_id"]
            contrasts.append(
                Contrast(
                    f"{_name(cut)} against {_name(first)} (global batch {key[0]})",
                    differences.to_numpy(dtype=np.float64),
                    tuple(sorted(set(ids))),
                )
            )
    return contrasts


def _unless_one_diverged(answer: Answer, context: Context, fixed: list[str]) -> tuple[Answer, str]:
    """Withhold "supported" where a trajectory diverged under one cut and not under another."""
    ended = context.runs[context.runs["status"].isin(["completed", "diverged"])]
    ended = ended[~_depends_on_cut(ended)]
    outcomes = ended.groupby([_BATCH, *fixed, "trajectory_id"])["status"].nunique()
    alone = int(outcomes.gt(1).sum())
    if not alone:
        return answer, ""
    text = f" {alone} of {len(outcomes)} trajectories diverged under one cut and not under another."
    return OPEN if answer == SUPPORTED else answer, text


def _name(cut: tuple[int, ...]) -> str:
    devices, steps, micro = cut
    return f"devices {devices}, micro {micro}, accumulation {steps}"


def _costs(context: Context, contrasts: list[Contrast]) -> str:
    """Say by how much the same cuts differ in memory and speed."""
    own = context.figures[context.figures["run_id"].isin(run_ids_of(contrasts))]
    said_of = []
    for name, words in (("peak_allocated_gib", "peak memory"), ("step_time_s", "step time")):
        means = own.groupby([_BATCH, *_CUT])[name].mean().dropna()
        if len(means) > 1:
            spans = means.groupby(level=0).agg(lambda values: values.max() / values.min())
            said_of.append(f"{words} by a factor of up to {spans.max():.2f}")
    return f"Among them differ {list_text(said_of, 'and')}." if said_of else ""
