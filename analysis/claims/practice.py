"""Claims that recommend a cut: accumulation of 4 or 8, and 16 x 7 x 2 = 224."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.claims.claim import ClaimResult, found, undecided
from batchscape.analysis.claims.contrasts import (
    CONTRADICTED,
    OPEN,
    SUPPORTED,
    Answer,
    Contrast,
    all_above,
    said,
)
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.estimates import FEWEST
from batchscape.text import count_text

__all__ = ["accumulation_4_or_8", "musev_224"]

_GOOD = np.log(1.05)
"""A cut that is slower by less than 5 % than every other counts as good: ours."""
_TYPICAL = (4, 8)
_MUSEV = (16, 7, 2)
_CUT = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps"]


def accumulation_4_or_8(context: Context) -> ClaimResult | None:
    """At a fixed global batch, 4 or 8 is not slower than any other accumulation."""
    figures = context.logs(context.figures["step_time_s"])
    figures = figures[np.isfinite(figures["value"])]
    definition = "ratio of the step time at a fixed global batch"
    of_places: list[list[list[Contrast]]] = []
    for (devices, batch), own in figures.groupby(["data_parallel_size", "global_batch_size"]):
        where = f"devices {devices}, global batch {batch}"
        wide = own.groupby(["block", _CUT[2]])["value"].mean().unstack(_CUT[2])
        ids = tuple(sorted(own["run_id"]))
        sides = [
            _against_others(wide, steps, f" ({where})", ids) for steps in _TYPICAL if steps in wide
        ]
        of_places.append([contrasts for contrasts in sides if contrasts])
    looked_at = [contrast for sides in of_places for side in sides for contrast in side]
    of_places = [
        own
        for sides in of_places
        if (own := [side for side in sides if any(len(c.values) >= FEWEST for c in side)])
    ]
    judged = [_best_side(sides, len(of_places)) for sides in of_places]
    if not looked_at:
        return None
    if not judged:
        return undecided(looked_at, definition)
    answers = [answer for answer, _ in judged]
    answer = next((a for a in (CONTRADICTED, OPEN) if a in answers), SUPPORTED)
    deciding = next(contrast for a, contrast in judged if a == answer)
    explanation = (
        f"In {count_text(len(judged), 'combination')} of devices and global batch, the "
        f"better of 4 and 8 against the fastest other: {said(deciding, 'ratio')}. Good means "
        "slower by less than 5 %; time alone is compared: whether the cuts train alike is a claim "
        "of its own. To be contradicted in one of several places is tested at the level over "
        "their number, and 4 and 8 share the level at which one of them is good."
    )
    return found(answer, deciding, looked_at, explanation, definition, ratio=True)


def _against_others(
    wide: pd.DataFrame, steps: int, where: str, ids: tuple[str, ...]
) -> list[Contrast]:
    """Compare one accumulation with every other that is neither 4 nor 8."""
    contrasts = []
    for other in (level for level in wide if level not in _TYPICAL):
        values = (wide[steps] - wide[other]).dropna().to_numpy(dtype=np.float64)
        if len(values):
            name = f"accumulation {steps} against {other}{where}"
            contrasts.append(Contrast(name, values, ids))
    return contrasts


def _best_side(sides: Sequence[list[Contrast]], places: int) -> tuple[Answer, Contrast]:
    """Judge 4 and 8 in one of some places: one of them that is good is enough."""
    judged: list[tuple[Answer, Contrast]] = []
    for contrasts in sides:
        # "Not slower than any" is "faster than each, but for the margin": the sign is turned.
        turned = [Contrast(c.name, -c.values, c.run_ids) for c in contrasts]
        decision = all_above(turned, -_GOOD, ways=len(sides), places=places)
        if decision:
            judged.append((decision.answer, contrasts[turned.index(decision.deciding)]))
    order = (SUPPORTED, OPEN, CONTRADICTED)
    return min(judged, key=lambda item: (order.index(item[0]), item[1].mean))


def musev_224(context: Context) -> ClaimResult | None:
    """No other cut of 224 on at most 16 devices is faster without more memory a device."""
    own = context.figures[
        context.figures["global_batch_size"].eq(224)
        & context.figures["data_parallel_size"].le(_MUSEV[0])
    ]
    cuts = own.groupby(_CUT).ngroup()
    here = own[_CUT].eq(list(_MUSEV)).all(axis=1)
    if not here.any() or cuts.nunique() < 2:
        return None
    definition = "ratio of the step time of another cut of 224 to that of 16 x 7 x 2"
    contrasts, answers = [], []
    others = own[~here].groupby(_CUT)
    level_count = others.ngroups
    for cut, other in others:
        name = "{} x {} x {}".format(*cut)
        time = _ratio(own[here], other, "step_time_s", name)
        memory = _ratio(own[here], other, "peak_allocated_gib", name)
        contrasts.append(time)
        answers.append(_dominates(time, memory, level_count))
    if all(len(contrast.values) < FEWEST for contrast in contrasts):
        return undecided(contrasts, definition)
    answer = next((a for a in (CONTRADICTED, OPEN) if a in answers), SUPPORTED)
    deciding = contrasts[answers.index(answer)]
    explanation = (
        "Balanced means on the Pareto front: no other cut is faster by 5 % with a peak that is "
        f"higher by less than 5 %. Of {len(contrasts)} other cuts: {said(deciding, 'ratio')}."
    )
    return found(answer, deciding, contrasts, explanation, definition, ratio=True)


def _ratio(base: pd.DataFrame, other: pd.DataFrame, name: str, cut: str) -> Contrast:
    logs = [
        np.log(
            frame.assign(value=frame[name].where(frame[name] > 0)).groupby("block")["value"].mean()
        )
        for frame in (base, other)
    ]
    values = (logs[1] - logs[0]).dropna().to_numpy(dtype=np.float64)
    ids = tuple(sorted({*base["run_id"], *other["run_id"]}))
    return Contrast(f"{cut} against 16 x 7 x 2", values, ids)


def _dominates(time: Contrast, memory: Contrast, count: int) -> Answer:
    """Tell whether another cut leaves 16 x 7 x 2 on the front (supported) or beats it."""
    if min(len(time.values), len(memory.values)) < FEWEST:
        return OPEN
    strict, level = 1 - 0.05 / count, 0.95
    if time.interval(strict)[1] < -_GOOD and memory.interval(strict)[1] < _GOOD:
        return CONTRADICTED
    if time.interval(level)[0] > -_GOOD or memory.interval(level)[0] > _GOOD:
        return SUPPORTED
    return OPEN
