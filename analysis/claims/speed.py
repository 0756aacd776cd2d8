"""Claims about time: of a micro-step, of a cut of a global batch, and of communication."""

from __future__ import annotations

from functools import partial

import numpy as np

from batchscape.analysis.claims.claim import ClaimResult, by_rule, found, undecided
from batchscape.analysis.claims.contrasts import (
    all_above,
    all_within,
    of_each_cut,
    pair,
    said,
)
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.follows import Followed, follows

__all__ = [
    "devices_scale_batch_linearly",
    "global_batch_is_free_per_iteration",
    "micro_before_accumulation",
    "microstep_time_follows_micro",
]

_SAME = np.log(1.10)
"""Times within 10 % count as equal, and growth means more than that: ours."""
_FASTER = np.log(1.02)
"""Two percent is the least that counts as faster: ours."""
_EXPOSED = 0.01
"""One percent of the step time is the least that counts as a communication cost: ours."""
_DEVICES, _MICRO, _STEPS = (
    "data_parallel_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
)


def microstep_time_follows_micro(context: Context) -> ClaimResult | None:
    """Forward and backward of one micro-step grow with the micro-batch, not with accumulation."""
    figures = context.figures
    figures = context.logs(figures["forward_backward_s"] / figures[_STEPS])
    along = pair(figures, "value", _MICRO, only_ends=True)
    across = pair(figures, "value", _STEPS)
    return follows(
        Followed(along, across, ("micro-batch", "accumulation at one micro-batch")),
        _SAME,
        "ratio of forward and backward time of a micro-step",
        lambda grows, equal: (
            f"Along the micro-batch: {grows}; along accumulation, worst of {len(across)}: {equal}. "
            "Mainly means growth of more than 10 % along the one and equality within 10 % along "
            "the other."
        ),
        reported="along",
    )


def global_batch_is_free_per_iteration(context: Context) -> ClaimResult | None:
    """Step time over accumulation stays equal while accumulation raises the global batch."""
    figures = context.figures
    figures = context.logs(figures["step_time_s"] / figures[_STEPS])
    contrasts = pair(figures, "value", _STEPS)
    return by_rule(
        contrasts,
        partial(all_within, margin=_SAME),
        "ratio of the time of an iteration (step time over accumulation)",
        lambda worst: (
            f"Worst of {len(contrasts)}: {worst}; alone means within 10 %. An update comes once in "
            "a step, so that its share falls as accumulation grows."
        ),
    )


def micro_before_accumulation(context: Context) -> ClaimResult | None:
    """At a fixed global batch the cut with most accumulation is slower than that with least."""
    figures = context.logs(context.figures["step_time_s"])
    contrasts = pair(figures, "value", _STEPS, at_one_batch=True, only_ends=True)
    return by_rule(
        contrasts,
        partial(all_above, threshold=_FASTER),
        "ratio of the step time at a fixed global batch",
        lambda least: f"Least of {len(contrasts)}: {least}; slower means by more than 2 %.",
    )


def devices_scale_batch_linearly(context: Context) -> ClaimResult | None:
    """Devices multiply the global batch, and the exchange takes a share of the step."""
    figures = context.figures
    scaled = figures.groupby([_MICRO, _STEPS])[_DEVICES].nunique().gt(1)
    if not scaled.any():
        return None
    figures = context.logs(figures["step_time_s"])
    figures = figures.join(scaled.rename("scaled"), on=[_MICRO, _STEPS])
    figures = figures[figures["scaled"]]
    figures = figures.assign(share=figures["exchange_s"] / figures["step_time_s"])
    known = figures[(figures[_DEVICES] > 1) & np.isfinite(figures["share"])]
    shares = of_each_cut(known, "share")
    definition = "share of the step time in exchange that backward did not hide"
    decision = all_above(shares, _EXPOSED)
    if decision is None:
        reason = None if shares else "no timed runs on several devices"
        return undecided(shares, definition, reason)
    slower = pair(figures, "value", _DEVICES)
    worst = [said(contrast, "ratio") for contrast in sorted(slower, key=lambda c: -c.mean)[:1]]
    weak = f" Step time at a fixed micro-batch and accumulation: {worst[0]}." if worst else ""
    explanation = (
        "The global batch is proportional to the number of devices at a fixed micro-batch and "
        "accumulation by definition, as their product, and is not tested: the cost is. Least "
        f"share of {len(shares)}: {said(decision.deciding, 'share')}; a cost means more than "
        f"1 % of the step time.{weak}"
    )
    return found(decision.answer, decision.deciding, shares, explanation, definition, ratio=False)
