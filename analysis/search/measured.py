"""The best of what was measured around the trials of a search, with its neighbours."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cells import setting_label
from batchscape.analysis.estimates import half_widths
from batchscape.analysis.numbers import significant

__all__ = ["best_measured", "means_along", "setting_text"]

_Point = Mapping[str, Any]
_OF_SETTINGS = {"best", "below", "above"}


def best_measured(studies: Sequence[Mapping[str, Any]], objectives: Sequence[str]) -> pd.DataFrame:
    """Return what the grid of each study found.

    Parameters
    ----------
    studies : sequence of mapping
        As `read_measured` returns them.
    objectives : sequence of str
        Of the search.

    Returns
    -------
    DataFrame
        A row for each interval of a study: `study`, `setting`, the `best` value of it, and what is
        `held` of the other settings; `below` and `above`, the values next to it (None: there is
        none), and their means, `below_mean` and `above_mean`. Where one point was measured, or a
        front of two objectives, a row a point, whose `best` is None. By objective its mean over
        seeds, infinite where one has no result, and the half-width of its interval as
        `<objective>_ci95`; `n`, the number of seeds; `runs`, apart by blanks. Nothing of a study
        that is not whole, or has no result.
    """
    rows = [row for study in studies for row in _rows(study, objectives)]
    if not rows:
        return pd.DataFrame()
    # Values stay what they are: one that is missing makes no whole number of another a fraction.
    kept = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
    found = pd.DataFrame(
        {n: pd.Series(v, dtype=object if n in _OF_SETTINGS else None) for n, v in kept.items()}
    )
    for name in objectives:
        found[f"{name}_ci95"] = half_widths(found.pop(f"{name}_sd"), found["n"])
    return found


def means_along(study: Mapping[str, Any], key: str) -> pd.Series[float]:
    """Return the mean of the first objective by the values of one setting, all else as it was.

    Parameters
    ----------
    study : mapping
        As `read_measured` returns it.
    key : str
        Of an interval.

    Returns
    -------
    Series
        In the order of the values; infinite where a seed has no result.
    """
    line = _line(study, key)
    return pd.Series({x: float(_values(line[x], 0).mean()) for x in sorted(line)}, dtype=float)


def _line(study: Mapping[str, Any], key: str) -> dict[Any, _Point]:
    """Return the points of a grid that differ from its first one in nothing else, by value."""
    points = study["points"]
    centre = points[0]["point"] if points else {}
    return {
        one["point"][key]: one for one in points if {**one["point"], key: centre[key]} == centre
    }


def _rows(study: Mapping[str, Any], objectives: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for found in study["brackets"]:
        key = found["key"]
        line = _line(study, key)
        best = line[found["best"]]
        row = _row(study, best, objectives)
        row |= {"setting": key, "best": found["best"], "held": _text(best["point"], key)}
        for side, end in (("below", "low"), ("above", "high")):
            beside = found[end]
            mean = None if beside is None else _values(line[beside], 0).mean()
            row |= {side: beside, f"{side}_mean": mean}
        rows.append(row)
    if not study["brackets"]:
        for one in study["points"]:
            row = _row(study, one, objectives)
            rows.append({**row, "setting": None, "best": None, "held": _text(one["point"])})
    # Without a result nothing is the best.
    return [row for row in rows if math.isfinite(row[objectives[0]])]


def _row(study: Mapping[str, Any], point: _Point, objectives: Sequence[str]) -> dict[str, Any]:
    row = {"study": study["study"], "on_front": point["on_front"], "n": len(point["seeds"])}
    for place, name in enumerate(objectives):
        values = _values(point, place)
        row[name] = values.mean()
        row[f"{name}_sd"] = values.std(ddof=1) if row["n"] > 1 and np.isfinite(row[name]) else None
    return {**row, "runs": " ".join(point["runs"])}


def _values(point: _Point, place: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the values of an objective by seed; infinite where there is none."""
    values = [math.inf if own[place] is None else own[place] for own in point["seeds"].values()]
    return np.array(values, dtype=np.float64)


def setting_text(value: object) -> str:
    """Write the value of a setting as YAML has it, numbers to three digits."""
    if isinstance(value, float):
        return significant(value, 3)
    return value if isinstance(value, str) else json.dumps(value)


def _text(point: Mapping[str, Any], but: str | None = None) -> str:
    """Write searched values in one line."""
    own = {setting_label(key): value for key, value in point.items() if key != but}
    return ", ".join(f"{name} {setting_text(value)}" for name, value in own.items())
