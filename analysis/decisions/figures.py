"""The picture of time against device-hours, and its front."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.decisions.candidates import DERIVED, is_to_target
from batchscape.analysis.decisions.show import geometry_text
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import ACCENT, GREY, MARK

_MAX_LABELS = 8
_LOOKS = {
    "measured": ACCENT,
    "derived": Look(ACCENT.colour, ACCENT.dark, hollow=True),
    "predicted": Look(GREY.colour, GREY.dark, "square", hollow=True),
    "recommended": Look(MARK.colour, symbol="diamond", hollow=True),
    "front": Look(MARK.colour, symbol="stroke", dash=(2, 2)),
}


def pareto_chart(candidates: pd.DataFrame, label: str, name: str, table: str) -> Chart | None:
    """Draw device-hours against time to the target; None with fewer than two points."""
    if not is_to_target(candidates):
        return None
    rows = candidates[np.isfinite(candidates["time_s"]) & candidates["fits"].astype(bool)]
    if len(rows) < 2:
        return None
    rows = rows[rows["source"].eq("measured") | rows["beyond"].eq("")]
    rows = rows.assign(
        series=rows["source"].mask(rows["derived"].astype(bool), "derived"),
        geometry=list(map(geometry_text, rows.to_dict("records"))),
    ).rename(columns={"time_low_s": "time_s_low", "time_high_s": "time_s_high"})
    rows = rows.drop(columns=["device_hours_low", "device_hours_high"])
    front = rows[rows["on_front"].astype(bool)].sort_values("time_s")
    chosen = rows[rows["recommended"].astype(bool)].drop(columns="series")
    line = front[["time_s", "device_hours"]]
    bars = rows.dropna(subset=["time_s_low", "time_s_high"])
    marks = [
        *([Marks("line", line, "front")] if len(front) > 1 else []),
        *([Marks("interval", bars)] if len(bars) else []),
        Marks("point", rows, text="geometry", size=24),
        *([Marks("point", chosen, "recommended", "geometry", size=90)] if len(chosen) else []),
        Marks("text", front.head(_MAX_LABELS).drop(columns="series"), text="geometry"),
    ]
    names = {*rows["series"], *(mark.name for mark in marks)}
    prefix = f"{label}: " if label else ""
    intervals = f", with {LEVEL:.0%} intervals of the time" if len(bars) else ""
    front_text = (
        "Line: the front, the geometries that none beats in both"
        if len(front) > 1
        else "Named: the geometry that none beats in either"
    )
    hollow = f" Hollow: {DERIVED}." if "derived" in names else ""
    return Chart(
        name,
        f"Geometries to choose from{f': {label}' if label else ''}",
        f"{prefix}Device time against time to the target{intervals}. {front_text}.{hollow}",
        Axis({"time_s": "time to target (s)"}, kind="log"),
        Axis({"device_hours": "device-hours"}, kind="log"),
        marks,
        {name: look for name, look in _LOOKS.items() if name in names},
        tables=[f"tables/{table}.csv"],
    )
