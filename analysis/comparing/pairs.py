"""Pairs of runs, their differences, and figures on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import WHERE, Cells, plain_texts
from batchscape.analysis.estimates import FEWEST, Estimate, half_width

_WORDS = {
    "micro_batch_size": "micro",
    "gradient_accumulation_steps": "accumulation",
    "data_parallel_size": "devices",
    "cut": "",
}
"""Words before values; a cut needs none."""

Level = Any
"""A value of the compared factor."""

Which = Callable[[Sequence[Level]], Iterable[tuple[Level, Level]]]
"""Takes the levels in order, and returns pairs of level and base. Without a base (None) the values
of the level are taken, and no differences."""


@dataclass(frozen=True, eq=False)
class Contrast:
    """A difference between two levels of a factor, once for each pair of runs."""

    name: str
    """Both levels and their place, as in "accumulation 4 against 1 (micro 8, devices 1)"."""
    values: NDArray[np.float64]
    """One difference a pair, shape (n,); empty where two sides share none."""
    run_ids: tuple[str, ...]
    """Runs of these pairs that have a value, sorted."""
    bounds_below: bool = False
    """Whether some values are lower bounds of the differences, as where a run was censored."""
    place: tuple[Level, ...] = ()
    """Values of the columns that are equal on both sides."""
    level: Level = None
    base: Level = None
    size: Estimate | None = None
    """The mean as a topic estimates it, in place of the values' own."""

    @classmethod
    def of_estimate(cls, name: str, size: Estimate, run_ids: Iterable[str]) -> Contrast:
        """Take an estimate; of enough units, but without an interval, it has no value."""
        n = 0 if size.n >= FEWEST and np.isnan(size.low + size.high) else size.n
        return cls(name, np.full(n, size.value), tuple(sorted(set(run_ids))), size=size)

    @property
    def mean(self) -> float:
        """Mean difference; NaN without a pair."""
        return float(self.values.mean()) if len(self.values) else np.nan

    def interval(self, level: float) -> tuple[float, float]:
        """Return the t-interval of the mean difference; NaN for fewer than two pairs."""
        if self.size is not None:
            return self.size.low, self.size.high
        half = half_width(self.values, level)
        return self.mean - half, np.inf if self.is_open else self.mean + half

    @property
    def is_open(self) -> bool:
        """Whether its interval has no upper end."""
        return self.bounds_below and len(self.values) > 1

    def estimate(
        self, definition: str, kind: str, unit: str = "", note: str | None = None
    ) -> Estimate:
        """Estimate the mean, or for the kind `ratio` the geometric mean, with its 95 % interval."""
        about = f"{definition}: {self.name}"
        if self.size is not None:
            return replace(self.size, definition=about)
        n = len(self.values)
        method = f"t over {n} paired differences" if n > 1 else "one pair, no interval"
        estimator = Estimate.of_ratio if kind == "ratio" else Estimate.of_mean
        estimate = estimator(self.values, about, method, unit=unit, note=note)
        return replace(estimate, high=np.inf) if self.is_open else estimate

    def text(self, kind: str) -> str:
        """Write the mean with its 95 % interval, and the name."""
        return f"{kind} {self.estimate(kind, kind).text(4)} for {self.name}"


def to_lowest(levels: Sequence[Level]) -> list[tuple[Level, Level]]:
    """Compare every level of a factor with the lowest."""
    return [(level, levels[0]) for level in levels[1:]]


def contrasts_of(
    rows: pd.DataFrame,
    factor: str,
    within: Sequence[str],
    unit: str,
    which: Which = to_lowest,
) -> list[Contrast]:
    """Compare levels of one factor, unit by unit, at equal values of the columns `within`.

    Parameters
    ----------
    rows : DataFrame
        One row a run: `run_id`, `value` (a logarithm where ratios are meant; NaN where there is
        none), and the columns named here. Several runs of one unit and level are averaged.
    factor : str
        Column that is compared.
    within : sequence of str
        Columns that are equal on both sides.
    unit : str
        Column that makes runs a pair.
    which : callable
        Chooses what is compared; by default every level with the lowest.

    Returns
    -------
    list of Contrast
        In the order of places and levels; without a value where two levels share no unit.
    """
    complete = rows.dropna(subset=[*within, unit, factor])
    keys = [complete[name].tolist() for name in (*within, unit, factor)]
    values = complete["value"].to_numpy(dtype=np.float64, na_value=np.nan).tolist()
    # By place, level and unit. A level without any value has a contrast too, but no runs behind it.
    places: dict[tuple[Level, ...], dict[Level, dict[Level, list[tuple[float, str]]]]] = {}
    for *within_values, block, level, value, run_id in zip(
        *keys, values, complete["run_id"], strict=True
    ):
        blocks = places.setdefault(tuple(within_values), {}).setdefault(level, {})
        if not np.isnan(value):
            blocks.setdefault(block, []).append((value, run_id))
    contrasts = []
    for place, blocks_by_level in sorted(places.items(), key=itemgetter(0)):
        suffix = f" ({settings_text(within, place)})" if within else ""
        for level, base in which(sorted(blocks_by_level)):
            if not {level, base} <= {None, *blocks_by_level}:
                continue
            against = "" if base is None else f" against {base}"
            sides = [blocks_by_level[side] for side in (level, base) if side is not None]
            shared = sorted(set.intersection(*(set(side) for side in sides)))
            means = [
                np.array([fmean(value for value, _ in side[block]) for block in shared])
                for side in sides
            ]
            run_ids = (run for side in sides for block in shared for _, run in side[block])
            contrasts.append(
                Contrast(
                    f"{settings_text([factor], [level])}{against}{suffix}",
                    means[0] - (0 if base is None else means[1]),
                    tuple(sorted(run_ids)),
                    place=place,
                    level=level,
                    base=base,
                )
            )
    return contrasts


def settings_text(names: Sequence[str], values: Iterable[Level]) -> str:
    """Write values of settings, as in "devices 1, micro 8"."""
    words = [_WORDS.get(name, name.replace("_", " ").removesuffix(" size")) for name in names]
    return ", ".join(f"{word} {value}".lstrip() for word, value in zip(words, values, strict=True))


def blocks_of(runs: pd.DataFrame, names: Sequence[str]) -> pd.Series[str]:
    """Join the values of some columns, by which runs are paired; missing columns are skipped."""
    return join_texts([plain_texts(runs[name]) for name in names if name in runs], "/", runs.index)


def join_texts(parts: Sequence[pd.Series[str]], separator: str, index: pd.Index) -> pd.Series[str]:
    """Join the texts of each row; empty where there are none."""
    # Plain objects: taking texts one by one out of a column of texts takes many times longer.
    columns = [part.to_numpy(dtype=object) for part in parts]
    rows = zip(*columns, strict=True) if parts else ([""] for _ in index)
    return pd.Series([separator.join(map(str, row)) for row in rows], index=index, dtype=str)


def labels_of(cells: Cells, runs: pd.DataFrame, names: Sequence[str]) -> pd.Series[str]:
    """Name each run by its cell's values of some settings, as in "model gpt, hardware H200"."""
    parts = [
        (name.replace("_", " ") if name in WHERE else cells.label_of(name))
        + " "
        + values_of(cells, runs, name)
        for name in names
    ]
    return join_texts(parts, ", ", runs.index)


def values_of(cells: Cells, runs: pd.DataFrame, name: str) -> pd.Series[str]:
    """Return a setting of each run as its cell has it."""
    return plain_texts(runs["cell"].map(cells.table[name]))


def logarithm(column: pd.Series[float]) -> pd.Series[float]:
    """Return the logarithm of a column; NaN where it is not above zero, or missing."""
    numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
    return pd.Series(np.log(np.where(numbers > 0, numbers, np.nan)), index=column.index)
