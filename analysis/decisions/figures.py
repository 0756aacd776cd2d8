"""The figure of time against device-hours, and its front."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.candidates import DERIVED
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.figures.style import COLUMN_IN, PALETTE, name_group, plain_ticks
from batchscape.analysis.numbers import TIMES
from batchscape.analysis.report.topic import Picture
from batchscape.text import count_text

__all__ = ["draw_pareto"]

_MAX_LABELS = 8
_NARROW = 5
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


def draw_pareto(candidates: pd.DataFrame, label: str = "", name: str = "pareto") -> Picture | None:
    """Draw device-hours against time to the target: a point a measured geometry.

    Parameters
    ----------
    candidates : DataFrame
        As `candidates_of` returns it.
    label : str
        Which group of runs it is of, where there are several.
    name : str
        File name of the picture.

    Returns
    -------
    Picture or None
        None with fewer than two points.
    """
    rows = candidates[
        (candidates["source"] == "measured")
        & candidates["fits"]
        & np.isfinite(candidates["time_s"])
    ]
    if len(rows) < 2 or not (rows["n_seeds"] > 0).all():
        return None
    unit, factor = ("h", 1 / 3600) if rows["time_s"].max() >= 7200 else ("s", 1.0)
    cost_unit, cost_factor = ("device-hours", 1.0) if unit == "h" else ("device-seconds", 3600.0)
    figure = Figure((COLUMN_IN, 3.0), layout="constrained")
    axes = figure.subplots()
    counts = sorted(rows["data_parallel_size"].unique())
    has_intervals = False
    for index, devices in enumerate(counts):
        own = rows[rows["data_parallel_size"] == devices]
        cost = own["device_hours"] * cost_factor
        time, high = own["time_s"] * factor, own["time_high_s"] * factor
        low = own["time_low_s"] * factor
        ends = np.abs(np.vstack([time - low, np.where(np.isfinite(high), high - time, math.nan)]))
        has_intervals |= bool(np.isfinite(ends).any())
        axes.errorbar(
            time,
            cost,
            xerr=np.nan_to_num(ends),
            fmt="o",
            markersize=4,
            elinewidth=0.7,
            color=PALETTE[index % len(PALETTE)],
            label=count_text(int(devices), "device"),
        )
        derived = own[own["derived"]]
        axes.plot(
            derived["time_s"] * factor,
            derived["device_hours"] * cost_factor,
            "o",
            markersize=2,
            color="white",
            zorder=3,
        )
    front = rows[rows["on_front"]].sort_values("time_s")
    if len(front) > 1:
        axes.plot(
            front["time_s"] * factor,
            front["device_hours"] * cost_factor,
            color="#888888",
            linewidth=1,
            drawstyle="steps-post",
            zorder=0,
        )
    for _, row in front.head(_MAX_LABELS).iterrows():
        cut = TIMES.join(str(int(row[name])) for name in FACTORS)
        axes.annotate(
            cut,
            (row["time_s"] * factor, row["device_hours"] * cost_factor),
            xytext=(4, -9),
            textcoords="offset points",
            fontsize=6,
        )
    axes.margins(0.15)
    ends = [rows["time_low_s"], rows["time_s"], rows["time_high_s"]]
    if _is_wide(pd.concat(ends)):
        axes.set_xscale("log")
    if _is_wide(rows["device_hours"]):
        axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        _label(axis)
    axes.set_xlabel(f"time to the target ({unit})")
    axes.set_ylabel(f"cost of the target ({cost_unit})")
    figure.legend(loc="outside lower center", ncols=min(len(counts), 4))
    name_group(figure, label)
    own = f"{label}: " if label else ""
    intervals = f", with {LEVEL:.0%} intervals of the time" if has_intervals else ""
    best = (
        "Line: the front, the geometries that none beats in both"
        if len(front) > 1
        else "Named: the geometry that none beats in either"
    )
    hollow = f" Hollow: {DERIVED}." if rows["derived"].any() else ""
    caption = f"{own}Device time against time to the target{intervals}. {best}.{hollow}"
    return Picture(name, caption, figure)


def _is_wide(values: pd.Series[float]) -> bool:
    known = values[np.isfinite(values) & (values > 0)]
    return bool(known.max() > _NARROW * known.min())


def _label(axis: Axis) -> None:
    """Write numbers in full, and few of them."""
    axis.set_tick_params(which="both", labelsize=7, length=3, pad=3)
    if axis.get_scale() == "log":
        plain_ticks(axis)
    else:
        axis.set_major_locator(MaxNLocator(5))
