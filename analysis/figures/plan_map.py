"""A picture of a plan: memory and throughput of every cut, by devices and micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from batchscape.analysis.figures.style import COLUMN_IN
from batchscape.analysis.numbers import memory_scale, significant
from batchscape.drawing import paper_style
from batchscape.errors import AnalysisError

__all__ = ["draw_plan", "save_plan"]

_KINDS = (".png", ".pdf", ".svg")
_GREY, _DARK = "#dddddd", 0.45
"""Colour of what is never launched; from this share of the scale on, letters are dark."""


def save_plan(cells: pd.DataFrame, path: Path) -> None:
    """Draw a plan into a file; parameters are those of `draw_plan`.

    Raises
    ------
    AnalysisError
        If the file's name says no kind of picture, or there is nothing to draw.
    """
    if path.suffix not in _KINDS:
        msg = f"a picture is a file that ends in one of {', '.join(_KINDS)}; given {path}"
        raise AnalysisError(msg)
    with paper_style():
        draw_plan(cells).savefig(path, dpi=200)


def draw_plan(cells: pd.DataFrame) -> Figure:
    """Draw fields of devices x micro-batch; the accumulation follows from the global batch.

    Parameters
    ----------
    cells : DataFrame
        One row a cell: `data_parallel_size`, `micro_batch_size`, `memory_gib` (NaN: not predicted),
        `fits` (`fits`, `unsure`, `does not fit`, or None), `rate` (tokens or samples a second; NaN:
        not known), `rate_unit`, and `is_launched`. Of several cells of one field the largest memory
        and the lowest rate are shown.

    Raises
    ------
    AnalysisError
        If no cell has devices and a micro-batch.
    """
    keys = ["data_parallel_size", "micro_batch_size"]
    placed = cells.dropna(subset=keys)
    if placed.empty:
        msg = "no cell of this plan has devices and a micro-batch, so there is nothing to draw"
        raise AnalysisError(msg)
    placed = placed.assign(
        unfit=placed["fits"].eq("does not fit"), unsure=placed["fits"].eq("unsure")
    )
    fields = placed.groupby(keys, as_index=False).agg(
        memory_gib=("memory_gib", "max"),
        rate=("rate", "min"),
        unfit=("unfit", "any"),
        unsure=("unsure", "any"),
        is_launched=("is_launched", "any"),
    )
    devices, micros = (sorted(fields[key].unique()) for key in keys)
    scale = memory_scale(fields["memory_gib"].dropna())
    size = (2 * max(COLUMN_IN, 0.55 * len(devices) + 1.4), max(2.0, 0.3 * len(micros) + 1.0))
    figure = Figure(size, layout="constrained")
    memory, rate = figure.subplots(1, 2)

    def amount(row: pd.Series[Any]) -> str:
        text = significant(row["memory_gib"] * scale.factor, 2)
        return f"{text}\ntoo big" if row["unfit"] else f"{text} ?" if row["unsure"] else text

    def pace(row: pd.Series[Any]) -> str:
        return significant(row["rate"], 2)

    _draw(memory, fields, "memory_gib", amount, (devices, micros))
    memory.set_title(f"peak of a rank's tensors ({scale.unit}); ?: may be too big")
    _draw(rate, fields[~fields["unfit"]], "rate", pace, (devices, micros))
    unit = next(iter(placed["rate_unit"].dropna()), "samples/s")
    rate.set_title(f"{unit}, where only a range is known its middle")
    for axes in (memory, rate):
        axes.set_xlabel("devices")
    memory.set_ylabel("micro-batch (samples a device)")
    return figure


def _draw(
    axes: Axes,
    fields: pd.DataFrame,
    name: str,
    text: Callable[[pd.Series[Any]], str],
    places: tuple[list[int], list[int]],
) -> None:
    devices, micros = places
    shown = fields[fields["is_launched"] & fields[name].gt(0)]
    colours = np.full((len(micros), len(devices)), np.nan)
    for _, row in shown.iterrows():
        at = micros.index(row["micro_batch_size"]), devices.index(row["data_parallel_size"])
        colours[at] = row[name]
    axes.set_facecolor(_GREY)
    axes.grid(visible=False)
    ends = np.nanmin(colours, initial=np.inf), np.nanmax(colours, initial=-np.inf)
    norm = LogNorm(*ends) if 0 < ends[0] < ends[1] else Normalize(0, 1)
    axes.imshow(colours, norm=norm, cmap="viridis", aspect="auto", origin="lower")
    for _, row in shown.iterrows():
        x, y = devices.index(row["data_parallel_size"]), micros.index(row["micro_batch_size"])
        is_light = ends[0] < ends[1] and float(norm(row[name])) > _DARK
        colour = "black" if is_light else "white"
        axes.text(x, y, text(row), ha="center", va="center", fontsize=6, color=colour)
    axes.set_xticks(range(len(devices)), [str(count) for count in devices])
    axes.set_yticks(range(len(micros)), [str(count) for count in micros])
