"""What a report shows of the gradient noise scale: a table, and a figure over the training."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from batchscape.analysis.cells import GEOMETRY, Cells, geometry_label
from batchscape.analysis.estimates import interval_text
from batchscape.analysis.figures.panels import context_title, lay_out
from batchscape.analysis.figures.style import Look
from batchscape.analysis.noise_scale.estimate import LEVEL, NOT_IDENTIFIED
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.grids import Grid
from batchscape.analysis.report.tables import GEOMETRY_HEADER, geometry_texts, setting_headers

__all__ = ["draw_noise_scale", "noise_scale_grid", "noise_scale_table"]


def noise_scale_table(cells: Cells, estimates: pd.DataFrame) -> pd.DataFrame:
    """Put the cell's geometry and settings before its estimate.

    Parameters
    ----------
    estimates : DataFrame
        As `cell_noise_scales` returns it.

    Returns
    -------
    DataFrame
        One row a cell in which the noise was sampled, indexed by `cell`.
    """
    return cells.table[[*GEOMETRY, *cells.settings]].join(estimates, how="inner")


def noise_scale_grid(table: pd.DataFrame, cells: Cells) -> Grid:
    """Choose what of the table goes on a page.

    Parameters
    ----------
    table : DataFrame
        As `noise_scale_table` returns it.
    cells : Cells
        What it was computed from.
    """
    settings = cells.shown
    columns = [geometry_texts(table), *(table[name].fillna(MISSING) for name in settings)]
    columns.append(_with_interval(table, ""))
    in_tokens = table["tokens_per_sample"].notna().any()
    if in_tokens:
        columns.append(
            _with_interval(table, "_tokens").where(table["tokens_per_sample"].notna(), MISSING)
        )
    columns += [table["b_small"].astype(str), table["b_big"].astype(str)]
    columns += [table["n_runs"].astype(str), table["n"].astype(str) + " " + _units(table)]
    headers = [GEOMETRY_HEADER, *setting_headers(settings), "noise scale (samples)"]
    headers += ["noise scale (tokens)"] if in_tokens else []
    headers += ["small batch", "large batch", "runs", "n"]
    return Grid(
        headers=headers,
        rows=[list(row) for row in zip(*columns, strict=True)],
        short_first="geometry",
        n_left=1 + len(settings),
        notes=[
            "Gradient noise scale: tr(S)/|G|^2, the simple one of McCandlish et al. 2018 "
            "(arXiv:1812.06162, appendix A.1), from the squared norms of gradients of a small and "
            "a large batch before clipping; numerator and denominator averaged apart over the "
            f"sampled optimizer steps of the whole training. In brackets its {LEVEL:.0%} interval "
            "(Fieller), over runs where there are several, else over the sampled steps of the one.",
            f"{NOT_IDENTIFIED}: the gradient's mean cannot be told from zero with so few samples, "
            "so the interval has no upper end.",
        ],
    )


def draw_noise_scale(cells: Cells, curves: pd.DataFrame, look: Mapping[str, Look]) -> Figure | None:
    """Draw the noise scale against samples seen, with its interval at every point.

    Cells whose settings differ get panels of their own.

    Parameters
    ----------
    curves : DataFrame
        As `noise_scale_curves` returns it.
    look : mapping
        As `style.looks` returns it.

    Returns
    -------
    Figure or None
        None where no cell has intervals at two points: there is no curve to draw.
    """
    drawn = curves[curves["estimate"].notna() & np.isfinite(curves["high"])]
    if not drawn["cell"].duplicated().any():
        return None
    labels = geometry_label(cells.table)
    context = cells.context_of()
    parts = [rows for _, rows in drawn.groupby(context.reindex(drawn["cell"]).to_numpy())]
    figure, panels = lay_out(len(parts), [2.2])
    # Intervals may reach far beyond the points.
    low, high = drawn["estimate"].min() / 3, drawn["estimate"].max() * 3
    for (axes,), rows in zip(panels, parts, strict=True):
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        for cell, own in rows.groupby("cell"):
            _draw_curve(axes, own, look[labels[cell]])
        if len(parts) > 1:
            axes.set_title(context_title(cells, int(rows["cell"].iloc[0])))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("samples")
    panels[0][0].set_ylabel("gradient noise scale (samples)")
    shown = set(labels[drawn["cell"].unique()])
    handles = [
        Line2D(
            [],
            [],
            color=look[name].colour,
            linestyle=look[name].dash,
            marker=look[name].marker,
            markersize=3,
            label=name,
        )
        for name in look
        if name in shown
    ]
    columns = 3 if len(parts) == 1 else 6
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=3.0)
    return figure


def _draw_curve(axes: Axes, rows: pd.DataFrame, look: Look) -> None:
    low, high = axes.get_ylim()
    axes.plot(
        rows["samples"],
        rows["estimate"],
        color=look.colour,
        linestyle=look.dash,
        linewidth=look.width,
        marker=look.marker,
        markersize=3,
    )
    starts, ends = rows["low"].clip(lower=low), rows["high"].clip(upper=high)
    if len(rows) == 1:
        axes.vlines(rows["samples"], starts, ends, color=look.colour, alpha=0.5, linewidth=0.8)
    else:
        axes.fill_between(rows["samples"], starts, ends, color=look.colour, alpha=0.12, linewidth=0)


def _with_interval(table: pd.DataFrame, unit: str) -> pd.Series[str]:
    texts = []
    parts = (table[f"{name}{unit}"] for name in ("estimate", "low", "high"))
    for found, low, high, n in zip(*parts, table["n"], strict=True):
        if math.isinf(high) or math.isnan(found):
            least = f" (≥ {significant(low, 3)})" if low > 0 else ""
            texts.append(NOT_IDENTIFIED + least)
        else:
            texts.append(interval_text(found, low, high, int(n)))
    return pd.Series(texts, index=table.index, dtype=str)


def _units(table: pd.DataFrame) -> pd.Series[str]:
    return table["method"].str.rpartition(" ")[2]
