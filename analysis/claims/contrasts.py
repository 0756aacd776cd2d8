"""Paired differences between cells, and what several of them decide together.

Every rule of a claim is one of three questions, with the threshold fixed in advance:

* are *all* differences above a threshold (an intersection-union test, Berger 1982: no correction
  is needed for "all"; that one of them is below is tested at the level over their number);
* are *all* within a margin (TOST, Schuirmann 1987: the 90 % interval lies inside; that one is
  outside is tested at the level over their number);
* is *any* above a threshold (tested at the level over their number; that none is needs no
  correction).

"Not significant" never decides anything: what neither interval settles is not identified. Neither
is what has fewer pairs than an interval is shown of (`estimates.FEWEST`): "all" and "none" hold
only where every comparison has so many. Equivalence alone asks for two, as in the report's tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.equivalence.tost import tost
from batchscape.analysis.estimates import FEWEST, LEVEL, Estimate, half_width
from batchscape.record.noise_scale import has_no_noise_scale

__all__ = [
    "CONTRADICTED",
    "EQUIVALENCE_FEWEST",
    "OPEN",
    "SUPPORTED",
    "Answer",
    "Contrast",
    "Decision",
    "all_above",
    "all_within",
    "any_above",
    "any_all_above",
    "both",
    "effect",
    "held",
    "of_comparable_cuts",
    "of_each_cut",
    "of_one_place",
    "pair",
    "run_ids_of",
    "said",
]

Answer = Literal["supported", "contradicted", "not identified"]
SUPPORTED: Answer = "supported"
CONTRADICTED: Answer = "contradicted"
OPEN: Answer = "not identified"

EQUIVALENCE_FEWEST = 2
"""Pairs from which two sides may be found equivalent, or not: a margin set beforehand leaves no
choice to make of so wide an interval."""

_WORDS = {
    "micro_batch_size": "micro",
    "gradient_accumulation_steps": "accumulation",
    "data_parallel_size": "devices",
    "global_batch_size": "global batch",
}


@dataclass(frozen=True, eq=False)
class Contrast:
    """A difference between two cells, once for each pair of runs."""

    name: str
    """What is compared with what, as in "accumulation 4 against 1 (micro 8, devices 1)"."""
    values: NDArray[np.float64]
    """One difference a pair, shape (n,); empty where two sides share none."""
    run_ids: tuple[str, ...]
    bounds_below: bool = False
    """Whether some values are lower bounds of the differences, as where a run was censored."""

    @property
    def mean(self) -> float:
        """Mean difference; NaN without a pair."""
        return float(self.values.mean()) if len(self.values) else np.nan

    def interval(self, level: float) -> tuple[float, float]:
        """Return the t-interval of the mean difference; NaN for fewer than two pairs."""
        half = half_width(self.values, level)
        return self.mean - half, np.inf if self.is_open else self.mean + half

    @property
    def is_open(self) -> bool:
        """Whether its interval has no upper end."""
        return self.bounds_below and len(self.values) > 1


class Decision(NamedTuple):
    """What some contrasts say, and the one that says it."""

    answer: Answer
    deciding: Contrast


_DEVICES, _MICRO, _STEPS = (
    "data_parallel_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
)


def held(factor: str, *, at_one_batch: bool = False) -> list[str]:
    """Name what is equal between cuts that are compared for one factor.

    A cut has three numbers of which the global batch is the product: what is not named follows from
    the factor and from what is. Settings, data and the machine are equal within a `Context`, and
    seeds, timing repeat and sweep within a block.

    Parameters
    ----------
    factor : str
        Devices, micro-batch, accumulation or `global_batch_size`, which accumulation makes.
    at_one_batch : bool
        Of accumulation: the global batch stays, and the micro-batch gives way.
    """
    if at_one_batch:
        return [_DEVICES, "global_batch_size"]
    made_by = _STEPS if factor == "global_batch_size" else factor
    return [name for name in (_DEVICES, _MICRO, _STEPS) if name != made_by]


def of_one_place(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Return the rows that differ in the global batch alone, of most batches; None without two."""
    groups = [own for _, own in rows.groupby(held("global_batch_size"))]
    most = max(groups, key=lambda own: own["global_batch_size"].nunique(), default=rows)
    return most if most["global_batch_size"].nunique() > 1 else None


def of_comparable_cuts(runs: pd.DataFrame) -> pd.DataFrame | None:
    """Return the runs whose losses the global batch alone tells apart: all, as cuts train alike.

    Where the objective depends on the cut, as with batch normalisation, those of one place.
    """
    is_of_cut = runs["not_invariant"].map(has_no_noise_scale).astype(bool)
    return of_one_place(runs) if is_of_cut.any() else runs


def pair(
    figures: pd.DataFrame,
    value: str,
    axis: str,
    *,
    at_one_batch: bool = False,
    only_ends: bool = False,
    only_doubled: bool = False,
) -> list[Contrast]:
    """Compare every level of one factor with its lowest, run by run, all in `held` equal.

    Parameters
    ----------
    figures : DataFrame
        `block` (runs of equal block are a pair), `run_id`, `value` and the geometry.
    value : str
        Column to take differences of; a logarithm where ratios are meant.
    axis : str
        The factor that varies.
    at_one_batch : bool
        As for `held`.
    only_ends : bool
        Compare the highest level alone.
    only_doubled : bool
        Leave out groups whose lowest level is not 1.

    Returns
    -------
    list of Contrast
        In the order of what is held and of the levels. Empty where the factor does not vary.
    """
    fixed = held(axis, at_one_batch=at_one_batch)
    known = figures.loc[
        np.isfinite(figures[value].to_numpy(dtype=float)),
        list(dict.fromkeys(["block", "run_id", value, axis, *fixed])),
    ]
    # Plain objects: taking texts one by one out of a column of texts takes many times longer.
    known = known.astype({"block": object, "run_id": object})
    known = known.sort_values(["block", "run_id"], kind="stable")
    contrasts = []
    for key, own in known.groupby(fixed, sort=True):
        wide = own.groupby(["block", axis])[value].mean().unstack(axis)
        levels = sorted(wide.columns)
        if len(levels) < 2 or (only_doubled and levels[0] != 1):
            continue
        where = ", ".join(f"{_word(n)} {v}" for n, v in zip(fixed, key, strict=True))
        for level in levels[-1:] if only_ends else levels[1:]:
            differences = (wide[level] - wide[levels[0]]).dropna()
            if differences.empty:
                continue
            used = own[own["block"].isin(differences.index) & own[axis].isin([level, levels[0]])]
            contrasts.append(
                Contrast(
                    f"{_word(axis)} {level} against {levels[0]} ({where})",
                    differences.to_numpy(dtype=np.float64),
                    tuple(sorted(set(used["run_id"]))),
                )
            )
    return contrasts


def of_each_cut(rows: pd.DataFrame, value: str) -> list[Contrast]:
    """Return the mean of a column in every block, for each geometry.

    Parameters
    ----------
    rows : DataFrame
        The geometry, `block`, `run_id` and the column.
    """
    names = ["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps"]
    contrasts = []
    for (devices, micro, steps), own in rows.groupby(names):
        values = own.groupby("block")[value].mean().to_numpy(dtype=np.float64)
        label = f"devices {devices}, micro {micro}, accumulation {steps}"
        contrasts.append(Contrast(label, values, tuple(sorted(own["run_id"]))))
    return contrasts


def all_above(
    contrasts: Sequence[Contrast], threshold: float, *, ways: int = 1, places: int = 1
) -> Decision | None:
    """Decide whether every difference is above a threshold; None where none has enough pairs.

    Parameters
    ----------
    ways : int
        How many such sets there are, one of which is enough to support: each has a share of the
        level.
    places : int
        How many such sets there are, one of which is enough to contradict.
    """
    usable = _usable(contrasts)
    if not usable:
        return None
    lows = [contrast.interval(_shared(ways))[0] for contrast in usable]
    highs = [contrast.interval(_shared(places * len(usable)))[1] for contrast in usable]
    answer = OPEN
    if min(lows) > threshold and len(usable) == len(contrasts):
        answer = SUPPORTED
    elif min(highs) < threshold:
        return Decision(CONTRADICTED, usable[int(np.argmin(highs))])
    return Decision(answer, usable[int(np.argmin(lows))])


def all_within(
    contrasts: Sequence[Contrast], margin: float, *, fewest: int = FEWEST
) -> Decision | None:
    """Decide whether every difference is within a margin; None where none has enough pairs."""
    usable = _usable(contrasts, fewest)
    if not usable:
        return None
    wide = [tost(c.values, margin, (1 - LEVEL) / 2 / len(usable)) for c in usable]
    if any(test.verdict == "different" for test in wide):
        beyond = [max(test.low, -test.high) for test in wide]
        return Decision(CONTRADICTED, usable[int(np.argmax(beyond))])
    reach = [tost(c.values, margin).smallest_margin for c in usable]
    every = len(usable) == len(contrasts)
    answer = SUPPORTED if every and max(reach) < margin else OPEN
    return Decision(answer, usable[int(np.argmax(reach))])


def any_above(contrasts: Sequence[Contrast], threshold: float) -> Decision | None:
    """Decide whether some difference is above a threshold; None where none has enough pairs."""
    usable = _usable(contrasts)
    if not usable:
        return None
    lows = [contrast.interval(_shared(len(usable)))[0] for contrast in usable]
    highs = [contrast.interval(LEVEL)[1] for contrast in usable]
    best = usable[int(np.argmax(lows))]
    if max(lows) > threshold:
        return Decision(SUPPORTED, best)
    every = len(usable) == len(contrasts)
    return Decision(CONTRADICTED if every and max(highs) < threshold else OPEN, best)


def any_all_above(groups: Sequence[Sequence[Contrast]], threshold: float) -> Decision | None:
    """Decide whether in some group every difference is above a threshold.

    So the smallest of several means is compared with the smallest of others without choosing
    either on the data that test it: a group for each of the others, which share the level.
    None where none has enough pairs.
    """
    usable = [group for group in groups if _usable(group)]
    found = [all_above(group, threshold, ways=len(usable)) for group in usable]
    judged = [decision for decision in found if decision is not None]
    if not judged:
        return None
    best = max(judged, key=lambda decision: decision.deciding.interval(LEVEL)[0])
    if SUPPORTED in [decision.answer for decision in judged]:
        supported = [decision for decision in judged if decision.answer == SUPPORTED]
        return max(supported, key=lambda decision: decision.deciding.interval(LEVEL)[0])
    every = len(usable) == len(groups)
    none = every and all(decision.answer == CONTRADICTED for decision in judged)
    return Decision(CONTRADICTED if none else OPEN, best.deciding)


def both(first: Answer, second: Answer) -> Answer:
    """Join two answers that a claim needs: one contradiction is enough against it."""
    if CONTRADICTED in (first, second):
        return CONTRADICTED
    return SUPPORTED if first == second == SUPPORTED else OPEN


def effect(
    contrast: Contrast, definition: str, *, ratio: bool, unit: str = "", note: str | None = None
) -> Estimate:
    """Write a contrast as an estimate with its 95 % interval.

    Parameters
    ----------
    definition : str
        What the number is; the contrast's own name follows it.
    ratio : bool
        Whether values are logarithms of ratios.
    unit : str
        Unit of the value.
    note : str, optional
        What weakens it.
    """
    n = len(contrast.values)
    method = f"t over {n} paired differences" if n > 1 else "one pair, no interval"
    estimate = Estimate.of_ratio if ratio else Estimate.of_mean
    found = estimate(
        contrast.values, f"{definition}: {contrast.name}", method, unit=unit, note=note
    )
    return replace(found, high=np.inf) if contrast.is_open else found


def run_ids_of(contrasts: Sequence[Contrast]) -> tuple[str, ...]:
    """Return the runs behind some contrasts, sorted."""
    return tuple(sorted({run for contrast in contrasts for run in contrast.run_ids}))


def said(contrast: Contrast, kind: Literal["ratio", "difference", "exponent", "share"]) -> str:
    """Write a contrast as half a sentence: its mean, its 95 % interval, and what it compares."""
    return f"{kind} {effect(contrast, kind, ratio=kind == 'ratio').text(4)} for {contrast.name}"


def _usable(contrasts: Sequence[Contrast], fewest: int = FEWEST) -> list[Contrast]:
    return [contrast for contrast in contrasts if len(contrast.values) >= fewest]


def _shared(count: int) -> float:
    """Level of an interval that is one of several (Bonferroni)."""
    return 1 - (1 - LEVEL) / count


def _word(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))
