"""Results of claims about memory and time: figures of cuts, compared pair by pair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.claims.claim import Result
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.rules import CONTRADICTED
from batchscape.analysis.comparing.pairs import Contrast, Level, Which, contrasts_of, to_lowest
from batchscape.analysis.cost.table import FACTORS

_DEVICES, _MICRO, _STEPS = FACTORS
_BATCH = "global_batch_size"
_PEAK, _TIME = "peak_allocated_gib", "step_time_s"
_PHASES = {
    "peak_allocated_first_backward_gib": "up to the first update",
    "peak_allocated_first_optimizer_step_gib": "in the first update",
    "peak_allocated_steady_gib": "in a later step",
}
"""Phases of a step in which memory peaks, in order of time."""
_TYPICAL = (4, 8)
_MUSEV = "16 x 7 x 2"


def of_micro_batch(context: Context) -> Result | None:
    """Peak memory along the micro-batch, and along the global batch at a fixed one."""
    peaks = context.logs(_PEAK)
    across = _along(_STEPS, peaks) + _along(_DEVICES, peaks)
    contrasts = {"global batch": across, "micro-batch": _along(_MICRO, peaks, _ends)}
    return _result(contrasts, phases=_phases(context))


def of_accumulation(context: Context) -> Result | None:
    """Peak memory with accumulation against that without, and how many models that is."""
    copies = context.figures[_PEAK] / context.figures["allocated_after_model_gib"]
    models = _along(_STEPS, context.figures.assign(value=copies), _to_1)
    mean = f"That is {_mean(models):.2f} times the model after it was built (its gradients are 1)."
    contrasts = {"cost": _along(_STEPS, context.logs(_PEAK), _to_1)}
    return _result(contrasts, phases=_phases(context), models=mean if models else "")


def of_rank_0(context: Context) -> Result | None:
    """Memory of rank 0 against the mean of the other ranks of its run."""
    ranks = context.evidence.ranks
    for name in ("device_used_gib", _PEAK):
        if name not in ranks:
            continue
        contrasts = _rank_0_contrasts(context, ranks.assign(memory=ranks[name].astype(float)))
        if not contrasts:
            continue
        is_allocator = name == _PEAK
        return Result(
            {"extra": contrasts},
            {"whose": _OF_ALLOCATOR if is_allocator else "of the device, as its driver tells"},
            f"ratio of {name.removesuffix('_gib').replace('_', ' ')}",
            # The claim is about contexts and buffers, which the allocator does not see.
            withheld=CONTRADICTED if is_allocator else None,
            unless_supported=_NOT_AGAINST if is_allocator else "",
        )
    return None


_OF_ALLOCATOR = "that the allocator of each process handed out"
_NOT_AGAINST = (
    "It leaves out contexts and buffers and so cannot speak against the claim: that takes two GPUs "
    "or more, since no processor's driver tells a rank's memory."
)


def of_micro_steps(context: Context) -> Result | None:
    """Forward and backward time of a micro-step, along the micro-batch and along accumulation."""
    times = _of_one_step(context, "forward_backward_s")
    along, across = _along(_MICRO, times, _ends), _along(_STEPS, times)
    return _result({"micro-batch": along, "accumulation": across})


def of_iterations(context: Context) -> Result | None:
    """Step time over accumulation, along accumulation."""
    return _result({"worst": _along(_STEPS, _of_one_step(context, _TIME))})


def of_step_times(context: Context) -> Result | None:
    """Step time at one global batch, of most accumulation against least."""
    return _result({"least": _at_one_batch(context, _ends)})


def of_typical_accumulation(context: Context) -> Result | None:
    """Step time at one global batch, of accumulation 4 and 8 against every other."""

    def to_others(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
        others = [level for level in levels if level not in _TYPICAL]
        return [(typical, other) for typical in _TYPICAL for other in others]

    return _result({"good": _at_one_batch(context, to_others)})


def of_cuts_of_224(context: Context) -> Result | None:
    """Step time, and peak memory, of other cuts of 224 on at most 16 devices against 16 x 7 x 2."""
    figures = context.figures
    figures = figures[figures[_BATCH].eq(224) & figures[_DEVICES].le(16)]
    names = [" x ".join(map(str, cut)) for cut in figures[[*FACTORS]].to_numpy()]
    cuts = pd.Series(names, figures.index, dtype=str)
    if _MUSEV not in set(cuts) or cuts.nunique() < 2:
        return None

    def to_musev(levels: Sequence[str]) -> list[tuple[Level, Level]]:
        return [(cut, _MUSEV) for cut in levels if cut != _MUSEV]

    contrasts: list[Contrast] = []
    for name in (_TIME, _PEAK):
        rows = context.logs(name).loc[cuts.index].assign(cut=cuts)
        contrasts += contrasts_of(rows, "cut", [], "block", to_musev)
    return Result({"cuts": contrasts})


def of_exchange(context: Context) -> Result | None:
    """Share of the step time in exchange, on several devices of cuts measured on fewer, too."""
    times = context.logs(_TIME)
    times = times[times.groupby([_MICRO, _STEPS])[_DEVICES].transform("nunique").gt(1)]
    if times.empty:
        return None
    several = times[times[_DEVICES] > 1]
    several = several.assign(value=several["exchange_s"] / several[_TIME])
    shares = _along(_STEPS, several, lambda levels: [(level, None) for level in levels])
    if not shares:
        return Result({"share": []}, reason="no timed runs on several devices")
    slower = max(_along(_DEVICES, times), key=lambda contrast: contrast.mean, default=None)
    return Result({"share": shares}, {"slower": "" if slower is None else slower.text("ratio")})


def _result(contrasts: dict[str, list[Contrast]], **facts: object) -> Result | None:
    return Result(contrasts, facts) if any(contrasts.values()) else None


def _along(factor: str, rows: pd.DataFrame, which: Which = to_lowest) -> list[Contrast]:
    """Compare levels of one factor of a cut, both others equal."""
    return _compare(rows, factor, [name for name in FACTORS if name != factor], which)


def _at_one_batch(context: Context, which: Which) -> list[Contrast]:
    """Compare step times between accumulations, to which the micro-batch gives way."""
    return _compare(context.logs(_TIME), _STEPS, [_DEVICES, _BATCH], which)


def _compare(
    rows: pd.DataFrame, factor: str, within: Sequence[str], which: Which
) -> list[Contrast]:
    """Compare finite values of levels that share a seed and repeat."""
    finite = rows[np.isfinite(rows["value"].to_numpy(dtype=float))]
    contrasts = contrasts_of(finite, factor, within, "block", which)
    return [contrast for contrast in contrasts if len(contrast.values)]


def _ends(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
    return to_lowest(levels)[-1:]


def _to_1(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
    return to_lowest(levels) if levels[0] == 1 else []


def _of_one_step(context: Context, name: str) -> pd.DataFrame:
    """Return the logarithm of a time of all micro-steps of a step, over their number."""
    return context.logs(context.figures[name] / context.figures[_STEPS])


def _mean(contrasts: Sequence[Contrast]) -> float:
    return float(np.mean([contrast.mean for contrast in contrasts])) if contrasts else np.nan


def _phases(context: Context) -> str:
    """Say what accumulation costs in each phase, on average over its contrasts."""
    texts = []
    for name, words in _PHASES.items():
        if contrasts := _along(_STEPS, context.logs(name), _to_1):
            texts.append(f"{100 * np.expm1(_mean(contrasts)):+.1f} % {words}")
    return f"Accumulation changes the peak by {', '.join(texts)}." if texts else ""


def _rank_0_contrasts(context: Context, ranks: pd.DataFrame) -> list[Contrast]:
    """Compare the logarithms of what ranks hold, within runs of several ranks."""
    keys = ["sweep_dir", "run_id"]
    rows = ranks.merge(context.figures[[*keys, *FACTORS, "block"]], on=keys)
    # Processes of an earlier attempt had a life of their own.
    last = rows["attempt"] == rows.groupby(keys)["attempt"].transform("max")
    rows = rows[last & rows["memory"].gt(0) & rows[_DEVICES].gt(1)]
    rank = rows["rank"].eq(0).map({True: "0", False: "others"})
    means = rows.groupby([*keys, *FACTORS, "block", rank])["memory"].mean()
    logs = np.log(means).rename("value").reset_index()
    return contrasts_of(logs, "rank", FACTORS, "block", lambda _: [("0", "others")])
