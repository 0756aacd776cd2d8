"""Claims about peak memory: what it follows, and what accumulation and the first device cost."""

from __future__ import annotations

from functools import partial

import numpy as np

from batchscape.analysis.claims.claim import ClaimResult, by_rule, found, undecided
from batchscape.analysis.claims.contrasts import (
    CONTRADICTED,
    OPEN,
    Contrast,
    all_above,
    of_each_cut,
    pair,
    said,
)
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.follows import Followed, follows

__all__ = ["PHASES", "accumulation_costs_memory", "memory_follows_micro", "rank0_costs_memory"]

PHASES = {
    "peak_allocated_first_backward_gib": "up to the first update",
    "peak_allocated_first_optimizer_step_gib": "in the first update",
    "peak_allocated_steady_gib": "in a later step",
}
"""Phases of a step in which memory peaks, in order of time."""

_PEAK = "peak_allocated_gib"
_MARGIN = np.log(1.05)
"""Peaks within 5 % count as equal: ours, about what allocators round and fragment away."""
_LEAST = np.log(1.005)
"""Half a percent is the least that counts as a cost: ours."""
_DEVICES, _MICRO, _STEPS = (
    "data_parallel_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
)


def memory_follows_micro(context: Context) -> ClaimResult | None:
    """Peak memory grows with the micro-batch, and not with the global batch at a fixed one."""
    figures = context.logs(context.figures[_PEAK])
    along = pair(figures, "value", _MICRO, only_ends=True)
    across = pair(figures, "value", _STEPS)
    across += pair(figures, "value", _DEVICES)
    return follows(
        Followed(along, across, ("micro-batch", "global batch at one micro-batch")),
        _MARGIN,
        "ratio of peak allocated memory",
        lambda grows, equal: (
            f"Along the micro-batch: {grows}; along the global batch at a fixed micro-batch, worst "
            f"of {len(across)}: {equal}. Equal means within 5 %. {_phases(context)}"
        ),
        reported="across",
    )


def accumulation_costs_memory(context: Context) -> ClaimResult | None:
    """Accumulation holds gradients between micro-steps, so A > 1 peaks higher than A = 1."""
    figures = context.logs(context.figures[_PEAK])
    contrasts = pair(figures, "value", _STEPS, only_doubled=True)
    return by_rule(
        contrasts,
        partial(all_above, threshold=_LEAST),
        "ratio of peak allocated memory",
        lambda least: (
            f"Least of {len(contrasts)}: {least}; a cost is more than 0.5 %. "
            f"{_in_models(context)}{_phases(context)}"
        ),
    )


def rank0_costs_memory(context: Context) -> ClaimResult | None:
    """Rank 0 holds more than the other ranks of its run."""
    measured = [name for name in ("device_used_gib", _PEAK) if name in context.evidence.ranks]
    for name in measured:
        contrasts = _rank0(context, name)
        if contrasts:
            break
    else:
        return None
    definition = f"ratio of {name.removesuffix('_gib').replace('_', ' ')}, rank 0 to the others"
    decision = all_above(contrasts, np.log(1.01))
    if decision is None:
        return undecided(contrasts, definition)
    answer, whose = decision.answer, "of the device, as its driver tells"
    if name == _PEAK:
        whose = "that the allocator of each process handed out"
        if answer == CONTRADICTED:
            # What a device holds beside that, as contexts and buffers, is what the claim is about.
            answer = OPEN
            whose += ", which leaves out contexts and buffers and so cannot speak against the claim"
    explanation = (
        f"Memory {whose}. Least of {len(contrasts)} geometries: "
        f"{said(decision.deciding, 'ratio')}; extra means more than 1 %."
    )
    if answer == OPEN and name == _PEAK:
        explanation += (
            " To settle it takes two GPUs or more: no processor's driver tells a rank's memory."
        )
    return found(answer, decision.deciding, contrasts, explanation, definition, ratio=True)


def _rank0(context: Context, name: str) -> list[Contrast]:
    """Compare rank 0 with the mean of the other ranks, within runs of several ranks."""
    keys = ["sweep_dir", "run_id"]
    several = context.figures[context.figures[_DEVICES] > 1]
    rows = context.evidence.ranks[[*keys, "rank", "attempt", name]].merge(
        several[[*keys, _DEVICES, _MICRO, _STEPS, "block"]], on=keys
    )
    # Processes of an earlier attempt had a life of their own.
    rows = rows[rows["attempt"] == rows.groupby(keys)["attempt"].transform("max")]
    memory = rows[name].astype(float)
    rows = rows.assign(memory=memory.where(memory > 0), first=rows["rank"].eq(0))
    means = rows.groupby([*keys, _DEVICES, _MICRO, _STEPS, "block", "first"])["memory"].mean()
    wide = means.unstack("first").reindex(columns=[True, False]).dropna().reset_index()
    wide["value"] = np.log(wide[True] / wide[False])
    return of_each_cut(wide, "value")


def _phases(context: Context) -> str:
    """Say what accumulation costs in each phase, on average over what can be compared."""
    said = []
    for name, words in PHASES.items():
        figures = context.logs(context.figures[name])
        costs = pair(figures, "value", _STEPS, only_doubled=True)
        if costs:
            mean = np.mean([contrast.mean for contrast in costs])
            said.append(f"{100 * np.expm1(mean):+.1f} % {words}")
    return f"Accumulation changes the peak by {', '.join(said)}." if said else ""


def _in_models(context: Context) -> str:
    """Say the same cost in copies of the model, of which the gradients are one."""
    copies = context.figures[_PEAK] / context.figures["allocated_after_model_gib"]
    figures = context.figures.assign(value=copies.where(np.isfinite(copies)))
    costs = pair(figures, "value", _STEPS, only_doubled=True)
    if not costs:
        return ""
    mean = np.mean([contrast.mean for contrast in costs])
    return f"That is {mean:.2f} times the model after it was built (its gradients are 1). "
