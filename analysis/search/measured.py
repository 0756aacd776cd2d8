"""The best points of the grids around a search, with their neighbours."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import setting_label
from batchscape.analysis.estimates import FEWEST, half_width
from batchscape.analysis.numbers import significant


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
    rows = []
    for study in studies:
        lines = {bracket["key"]: _line(study, bracket["key"]) for bracket in study["brackets"]}
        bracketed_points = [(lines[b["key"]][b["best"]], b) for b in study["brackets"]]
        for point, bracket in bracketed_points or [(point, {}) for point in study["points"]]:
            key, values = bracket.get("key"), _values(point)
            row = {
                "study": study["study"],
                "n": len(values),
                objective: values.mean(),
                "runs": " ".join(point["runs"]),
                "setting": key,
                "best": bracket.get("best"),
                "held": settings_text({k: v for k, v in point["point"].items() if k != key}),
            }
            for side, end in (("below", "low"), ("above", "high")):
                neighbour = bracket.get(end)
                mean = None if neighbour is None else _values(lines[key][neighbour]).mean()
                row |= {side: neighbour, f"{side}_mean": mean}
            # Without a result nothing is the best.
            if math.isfinite(row[objective]):
                reach = half_width(values) if len(values) >= FEWEST else math.nan
                rows.append({**row, f"{objective}_ci95": reach})
    # As objects, integers stay integers beside a missing value.
    table = pd.DataFrame(rows, dtype=object)
    numbers = (objective, f"{objective}_ci95", "below_mean", "above_mean")
    return table.astype(dict.fromkeys(numbers, float) | {"n": int}) if rows else table


def means_along(study: Mapping[str, Any], key: str) -> pd.Series[float]:
    """Return the mean of the objective by the values of one setting, all others equal."""
    line = _line(study, key)
    return pd.Series({x: float(_values(line[x]).mean()) for x in sorted(line)}, dtype=float)


def _line(study: Mapping[str, Any], key: str) -> dict[Any, Mapping[str, Any]]:
    """Return the points of a grid that differ from its first one in a setting alone, by value."""
    points = study["points"]
    centre = points[0]["point"] if points else {}
    return {
        point["point"][key]: point
        for point in points
        if {**point["point"], key: centre[key]} == centre
    }


def _values(point: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return the values of the objective by seed; infinite where there is none."""
    values = point["seeds"].values()
    return np.array([math.inf if value is None else value for value in values], dtype=np.float64)


def setting_text(value: object) -> str:
    """Write the value of a setting as YAML has it, numbers to three digits."""
    if isinstance(value, float):
        return significant(value, 3)
    return value if isinstance(value, str) else json.dumps(value)


def settings_text(values: Mapping[str, Any]) -> str:
    """Write searched values in one line."""
    return ", ".join(f"{setting_label(k)} {setting_text(value)}" for k, value in values.items())
