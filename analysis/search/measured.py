"""The best points of the grids around a search, with their neighbours."""

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

_Point = Mapping[str, Any]
_OF_SETTINGS = {"best", "below", "above"}


def best_measured(studies: Sequence[Mapping[str, Any]], objective: str) -> pd.DataFrame:
    """Return the best value of each interval of each study.

    Parameters
    ----------
    studies : sequence of mapping
        As `read_grid_results` returns them.
    objective : str
        Name of what was minimised.

    Returns
    -------
    DataFrame
        A row for each interval of a study: `study`, `setting`, its `best` value, and the `held`
        values of the other settings; the neighbours of the best in the grid, `below` and `above`
        (None at an end), with their means, `below_mean` and `above_mean`. A study without intervals
        has a row a point, whose `best` is None. The objective has its mean over seeds, infinite
        where a seed has no result, and the half-width of its interval as `<objective>_ci95`. `n` is
        the number of seeds, `runs` their ids, separated by blanks. Rows without a result are left
        out.
    """
    rows = [row for study in studies for row in _rows(study, objective)]
    if not rows:
        return pd.DataFrame()
    # As objects, integers stay integers beside a missing value.
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
    table = pd.DataFrame(
        {n: pd.Series(v, dtype=object if n in _OF_SETTINGS else None) for n, v in columns.items()}
    )
    table[f"{objective}_ci95"] = half_widths(table.pop(f"{objective}_sd"), table["n"])
    return table


def means_along(study: Mapping[str, Any], key: str) -> pd.Series[float]:
    """Return the mean of the objective by the values of one setting, all others equal."""
    line = _line(study, key)
    return pd.Series({x: float(_values(line[x]).mean()) for x in sorted(line)}, dtype=float)


def _line(study: Mapping[str, Any], key: str) -> dict[Any, _Point]:
    """Return the points of a grid that differ from its first one in a setting alone, by value."""
    points = study["points"]
    centre = points[0]["point"] if points else {}
    return {
        point["point"][key]: point
        for point in points
        if {**point["point"], key: centre[key]} == centre
    }


def _rows(study: Mapping[str, Any], objective: str) -> list[dict[str, Any]]:
    rows = []
    for bracket in study["brackets"]:
        key = bracket["key"]
        line = _line(study, key)
        best = line[bracket["best"]]
        row = _row(study, best, objective)
        row |= {"setting": key, "best": bracket["best"], "held": _text(best["point"], key)}
        for side, end in (("below", "low"), ("above", "high")):
            neighbour = bracket[end]
            mean = None if neighbour is None else _values(line[neighbour]).mean()
            row |= {side: neighbour, f"{side}_mean": mean}
        rows.append(row)
    if not study["brackets"]:
        for point in study["points"]:
            row = _row(study, point, objective)
            rows.append({**row, "setting": None, "best": None, "held": _text(point["point"])})
    # Without a result nothing is the best.
    return [row for row in rows if math.isfinite(row[objective])]


def _row(study: Mapping[str, Any], point: _Point, objective: str) -> dict[str, Any]:
    values, n = _values(point), len(point["seeds"])
    mean = values.mean()
    return {
        "study": study["study"],
        "n": n,
        objective: mean,
        f"{objective}_sd": values.std(ddof=1) if n > 1 and np.isfinite(mean) else None,
        "runs": " ".join(point["runs"]),
    }


def _values(point: _Point) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the values of the objective by seed; infinite where there is none."""
    values = point["seeds"].values()
    return np.array([math.inf if value is None else value for value in values], dtype=np.float64)


def setting_text(value: object) -> str:
    """Write the value of a setting as YAML has it, numbers to three digits."""
    if isinstance(value, float):
        return significant(value, 3)
    return value if isinstance(value, str) else json.dumps(value)


def _text(point: Mapping[str, Any], but: str | None = None) -> str:
    """Write searched values in one line."""
    return ", ".join(
        f"{setting_label(key)} {setting_text(value)}" for key, value in point.items() if key != but
    )
