"""Contrasts of memory and time between cuts, which claims name by factor and figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.claims.claim import Result
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.comparing.pairs import (
    Contrast,
    Level,
    Which,
    contrasts_of,
    logarithm,
    to_lowest,
)
from batchscape.analysis.cost.table import FACTORS

DEVICES, MICRO, STEPS = FACTORS
BATCH = "global_batch_size"
_TYPICAL = (4, 8)
_MUSEV = "16 x 7 x 2"

Value = Callable[[pd.DataFrame], "pd.Series[float]"]
"""Computes from the figures of runs what is compared."""
Query = Callable[[Context], list[Contrast]]


def asked(queries: Mapping[str, Query]) -> Callable[[Context], Result | None]:
    """Return the contrasts of each rule by its name; None in a context that has none at all."""

    def result(context: Context) -> Result | None:
        contrasts = {name: query(context) for name, query in queries.items()}
        return Result(contrasts) if any(contrasts.values()) else None

    return result


def along(*factors: str, value: Value, which: Which = to_lowest, at: Sequence[str] = ()) -> Query:
    """Compare levels of each factor, where the other factors, or `at`, are equal."""

    def query(context: Context) -> list[Contrast]:
        rows = context.figures.assign(value=value(context.figures))
        rows = rows[np.isfinite(rows["value"].to_numpy(dtype=float))]
        contrasts = [
            contrast
            for factor in factors
            for contrast in contrasts_of(
                rows, factor, at or [name for name in FACTORS if name != factor], "block", which
            )
        ]
        return [contrast for contrast in contrasts if len(contrast.values)]

    return query


def log_of(name: str) -> Value:
    """Take the logarithm of a figure, so that its differences are ratios."""
    return lambda figures: logarithm(figures[name])


def log_per_micro_step(name: str) -> Value:
    """Take the logarithm of a time of a step over its micro-steps."""
    return lambda figures: logarithm(figures[name] / figures[STEPS])


def exposed_share(figures: pd.DataFrame) -> pd.Series[float]:
    """Return the share of the step time in exchange, on several devices."""
    share: pd.Series[float] = figures["exchange_s"] / figures["step_time_s"]
    return share.where(figures[DEVICES].gt(1))


def highest_to_lowest(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
    """Compare the highest level with the lowest."""
    return to_lowest(levels)[-1:]


def to_1(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
    """Compare every level with 1, where that was tried."""
    return to_lowest(levels) if levels[0] == 1 else []


def itself(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
    """Take the values of every level, compared with none."""
    return [(level, None) for level in levels]


def typical_to_others(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
    """Compare accumulation of 4 and of 8 with every other."""
    others = [level for level in levels if level not in _TYPICAL]
    return [(typical, other) for typical in _TYPICAL for other in others]


def against_musev(context: Context) -> list[Contrast]:
    """Compare step times, then peaks, of cuts of 224 on at most 16 devices with 16 x 7 x 2."""
    figures = context.figures
    figures = figures[figures[BATCH].eq(224) & figures[DEVICES].le(16)]
    cuts = [" x ".join(map(str, cut)) for cut in figures[[*FACTORS]].to_numpy()]

    def to_musev(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
        return [(cut, _MUSEV) for cut in levels if cut != _MUSEV]

    return [
        contrast
        for name in ("step_time_s", "peak_allocated_gib")
        for contrast in contrasts_of(
            figures.assign(cut=cuts, value=logarithm(figures[name])), "cut", [], "block", to_musev
        )
    ]


def of_rank_0(context: Context) -> list[Contrast]:
    """Compare what rank 0 holds on its device with the mean of the other ranks of its run."""
    keys = ["sweep_dir", "run_id"]
    ranks = context.evidence.ranks.reindex(columns=[*keys, "rank", "attempt", "device_used_gib"])
    rows = ranks.merge(context.figures[[*keys, *FACTORS, "block"]], on=keys)
    # Processes of an earlier attempt had a life of their own.
    last = rows["attempt"] == rows.groupby(keys)["attempt"].transform("max")
    rows = rows[last & rows["device_used_gib"].gt(0) & rows[DEVICES].gt(1)]
    rank = rows["rank"].eq(0).map({True: "0", False: "others"})
    means = rows.groupby([*keys, *FACTORS, "block", rank])["device_used_gib"].mean()
    logs = means.astype(float).apply(np.log).rename("value").reset_index()
    return contrasts_of(logs, "rank", FACTORS, "block", lambda _: [("0", "others")])
