"""Claims about convergence: fewer updates, and decompositions of one global batch."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.claims.claim import ONE_SEED, Finding, found, nothing
from batchscape.analysis.claims.contrasts import (
    OPEN,
    SUPPORTED,
    Answer,
    Contrast,
    all_within,
    any_above,
    run_ids_of,
    said,
)
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.rates import best_rates, loss_of
from batchscape.analysis.comparing.pairs import logarithm

__all__ = [
    "accumulation_equals_large_batch",
    "decompositions_are_equivalent",
    "fewer_updates_slower_convergence",
]

_SLOWER = np.log(1.05)
"""Five percent is the least that counts as slower: ours."""
_SAMPLES_ARE_TIME = (
    " These are samples, not seconds. Were every global batch cut into equal micro-batches on as "
    "many devices, time would go with them but for what an update itself takes; where "
    "micro-batches grow with the global batch it need not."
)
_BATCH = "global_batch_size"
_CUT = ["data_parallel_size", "gradient_accumulation_steps", "micro_batch_size"]


def fewer_updates_slower_convergence(context: Context) -> Finding | None:
    """The largest global batch needs more than some smaller one to reach a target loss."""
    if context.reaches.empty or context.reaches[_BATCH].nunique() < 2:
        return None
    target, reaches, note = _at_one_target(context.reaches)
    measure, words = _measure(reaches)
    reaches = reaches.assign(value=_log_or_bound(reaches, measure))
    contrasts = _largest_against_others(reaches)
    definition = f"ratio of the {words} to a loss of {target:.4g}"
    decision = any_above(contrasts, _SLOWER)
    if decision is None:
        reason = ONE_SEED if contrasts else f"the loss of {target:.4g} was hardly reached"
        return nothing(reason, definition, run_ids_of(contrasts), contrasts)
    weak = "" if measure == "time_to_target_s" else _SAMPLES_ARE_TIME
    bound = (
        " Some runs did not reach it and count as lower bounds."
        if (decision.deciding.bounds_below)
        else ""
    )
    explanation = (
        f"Largest against {len(contrasts)} smaller global batches at a loss of {target:.4g}, most: "
        f"{said(decision.deciding, 'ratio')}; slower means by more than 5 %.{weak}{bound}"
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


def decompositions_are_equivalent(context: Context) -> Finding | None:
    """All cuts of one global batch end at the same loss, run by run, within the margin."""
    figures = _losses(context)
    contrasts = _cuts(figures, [])
    if not contrasts:
        return None
    definition = "difference of final loss between two cuts of one trajectory"
    decision = all_within(contrasts, context.margin)
    if decision is None:
        return nothing(ONE_SEED, definition, run_ids_of(contrasts), contrasts)
    cuts = figures[figures["run_id"].isin(run_ids_of(contrasts))][_CUT].drop_duplicates()
    fork = {(1, 1, 32), (4, 1, 8), (2, 2, 8), (1, 4, 8)}
    present = len(fork & set(cuts.itertuples(index=False, name=None)))
    explanation = (
        f"Farthest of {len(contrasts)}: {said(decision.deciding, 'difference')}; alike means that "
        f"every 90 % interval lies within {context.margin:g} nats. Of the four cuts of 32 in the "
        f"claim's table, {present} took part. {_costs(context, contrasts)}"
    )
    answer, alone = _unless_one_diverged(decision.answer, context, [])
    return found(
        answer,
        decision.deciding,
        contrasts,
        explanation + alone,
        definition,
        ratio=False,
        unit="nats",
    )


def accumulation_equals_large_batch(context: Context) -> Finding | None:
    """Accumulation over A micro-batches ends at the loss of one that is A times larger."""
    figures = _losses(context)
    least = figures.groupby([_BATCH, "data_parallel_size"])["gradient_accumulation_steps"]
    contrasts = _cuts(figures[least.transform("min").eq(1)], ["data_parallel_size"])
    if not contrasts:
        return None
    definition = "difference of final loss between accumulation and one large micro-batch"
    decision = all_within(contrasts, context.margin)
    if decision is None:
        return nothing(ONE_SEED, definition, run_ids_of(contrasts), contrasts)
    explanation = (
        f"Farthest of {len(contrasts)}: {said(decision.deciding, 'difference')}; equal means that "
        f"every 90 % interval lies within {context.margin:g} nats."
    )
    answer, alone = _unless_one_diverged(decision.answer, context, ["data_parallel_size"])
    return found(
        answer,
        decision.deciding,
        contrasts,
        explanation + alone,
        definition,
        ratio=False,
        unit="nats",
    )


def _at_one_target(reaches: pd.DataFrame) -> tuple[float, pd.DataFrame, str | None]:
    """Choose the lowest target that all runs at their best rates reached, else the highest."""
    chosen = {}
    for target in reaches["target_loss"].astype(float).unique().tolist():
        own = reaches[reaches["target_loss"].eq(target)]
        samples = own["samples_to_target"].astype(float)
        chosen[target] = best_rates(own, samples.where(own["outcome"].eq("reached"), np.inf))
    reached = [t for t, pick in chosen.items() if pick.runs["outcome"].eq("reached").all()]
    target = min(reached, default=max(chosen))
    return target, chosen[target].runs, chosen[target].note


def _measure(reaches: pd.DataFrame) -> tuple[str, str]:
    own = reaches[reaches["outcome"].eq("reached")]
    # With another micro-batch a sample takes another time, and that is another claim.
    same_cost = len(own[["data_parallel_size", "micro_batch_size"]].drop_duplicates()) == 1
    timed = same_cost and "time_to_target_s" in own and bool(own["timing_valid"].all())
    if timed and own["time_to_target_s"].notna().all():
        return "time_to_target_s", "time"
    return "samples_to_target", "samples"


def _log_or_bound(reaches: pd.DataFrame, measure: str) -> pd.Series[float]:
    """Return the logarithm of what a run needed, or of what it certainly exceeded."""
    value = reaches[measure].astype(float).where(reaches["outcome"].eq("reached"))
    if measure == "samples_to_target" and "steps_low" in reaches:
        low = reaches["steps_low"].astype(float) * reaches[_BATCH]
        low = low.where(np.isfinite(low))
        # What diverged never reaches: it exceeds at least what the longest run of its batch did.
        longest = low.groupby(reaches[_BATCH]).transform("max")
        value = value.fillna(low).fillna(longest)
    return logarithm(value)


def _largest_against_others(reaches: pd.DataFrame) -> list[Contrast]:
    # Different numbers of devices or micro-batches share a trajectory: seeds are the pairs.
    wide = reaches.groupby(["seed_block", _BATCH])["value"].mean().unstack(_BATCH)
    open_ = reaches["outcome"].ne("reached").groupby(reaches[_BATCH]).any()
    batches = sorted(wide.columns.astype("int64").tolist())
    unreached = set(open_.index[open_].tolist())
    contrasts = []
    # A bound of the smaller batch would be one from above: such pairs say nothing.
    for batch in (b for b in batches[:-1] if b not in unreached):
        differences = (wide[batches[-1]] - wide[batch]).dropna()
        if len(differences):
            used = reaches[reaches[_BATCH].isin([batch, batches[-1]])]
            contrasts.append(
                Contrast(
                    f"global batch {batches[-1]} against {batch}",
                    differences.to_numpy(dtype=np.float64),
                    tuple(sorted(set(used["run_id"]))),
                    bounds_below=batches[-1] in unreached,
                )
            )
    return contrasts


def _losses(context: Context) -> pd.DataFrame:
    loss = loss_of(context).reindex(context.figures.index)
    return context.figures.assign(value=loss.where(np.isfinite(loss)))


def _cuts(figures: pd.DataFrame, fixed: list[str]) -> list[Contrast]:
    """Pair every cut with the first of its global batch, on the same trajectories."""
    known = figures.dropna(subset=["value", "trajectory_id"])
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
            ids = used.loc[used[_CUT].apply(tuple, axis=1).isin([cut, first]), "run_id"]
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
    return f"Among them differ {' and '.join(said_of)}." if said_of else ""
