"""The gradient noise scale in the report."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.estimates import LEVEL, NOT_IDENTIFIED, Estimate
from batchscape.analysis.noise_scale.estimate import noise_scale_curves
from batchscape.analysis.noise_scale.figures import noise_scale_charts
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import geometry_column, setting_columns
from batchscape.analysis.report.topic import Section

_DEFINITION = (
    "tr(S)/|G|^2 in samples, from squared norms of gradients of a small and a large batch before "
    "clipping, numerator and denominator averaged apart over the sampled optimizer steps"
)
_ENDS = {"samples": "", "tokens": "_tokens"}
"""Suffixes of columns, by unit."""


def noise_scale_section(
    cells: Cells, steps: pd.DataFrame, estimates: pd.DataFrame, at_best: Mapping[int, float]
) -> Section | None:
    """Show the gradient noise scale by global batch; None where it was not sampled."""
    if estimates.empty:
        return None
    table = cells.table[[*GEOMETRY, *cells.settings]].join(estimates, how="inner")
    identified = table[table["note"].isna() & table["estimate"].notna()]
    ends = dict.fromkeys(f"{end:.3g}" for end in identified["estimate"].agg(["min", "max"]))
    answer = (
        f"The gradient noise scale is {' to '.join(ends)} samples over the whole training, where "
        f"it is identified ({len(identified)} of {len(table)} cells); intervals are in the table."
    )
    if identified.empty:
        answer = (
            f"The gradient noise scale is not identified in any of {len(table)} cells: too few "
            "sampled steps to tell the gradient's mean from zero."
        )
    curves = noise_scale_curves(cells, steps)
    return Section(
        "Gradient noise scale",
        [answer],
        [_table(table, cells)],
        list(noise_scale_charts(cells, identified, curves, at_best)),
        headlines={} if cells.contexts else _headlines(table),
        chart_data={"noise_scale_curve": curves.join(cells.table[[*GEOMETRY]], on="cell")},
    )


def _table(table: pd.DataFrame, cells: Cells) -> Table:
    # An estimate without an upper end is not identified.
    identified = {
        f"known{end}": table[f"estimate{end}"].mask(np.isinf(table[f"high{end}"]))
        for end in _ENDS.values()
    }
    units = table["n"].astype(str) + " " + table["method"].str.rpartition(" ")[2]
    scales = [
        Column(
            f"known{end}",
            f"noise scale ({unit})",
            "",
            3,
            f"low{end}",
            f"high{end}",
            n="n",
            missing=NOT_IDENTIFIED,
        )
        for unit, end in _ENDS.items()
        if unit == "samples" or table["tokens_per_sample"].notna().any()
    ]
    return Table(
        "noise_scale",
        "Gradient noise scale",
        table.assign(**identified, cell=table.index),
        [
            geometry_column(table),
            *setting_columns(table, cells.key_settings),
            *scales,
            Column("b_small", "small batch"),
            Column("b_big", "large batch"),
            Column("n_runs", "runs"),
            Column("n", texts=units),
        ],
        notes=[
            "Gradient noise scale: tr(S)/|G|^2, the simple one of McCandlish et al. 2018 "
            "(arXiv:1812.06162, appendix A.1), from the squared norms of gradients of a small and "
            "a large batch before clipping; numerator and denominator averaged apart over the "
            f"sampled optimizer steps of the whole training. In brackets its {LEVEL:.0%} interval "
            "(Fieller), over runs where there are several, else over the sampled steps of the one.",
            f"{NOT_IDENTIFIED}: the gradient's mean cannot be distinguished from zero by so few "
            "samples, so the interval has no upper end.",
        ],
        hidden=[*identified, "cell"],
    )


def _headlines(table: pd.DataFrame) -> dict[str, Estimate]:
    """Quote, for each global batch, the cell with the most runs, then the narrowest interval."""
    width = (table["high"] / table["low"]).where(table["note"].isna())
    # The table shows the value of a single sampled step, or with an open interval; no text may.
    value = table["estimate"].where(np.isfinite(table["high"])).astype(float)
    order = table.assign(width=width, value=value).sort_values(
        ["n_runs", "width"], ascending=[False, True], kind="stable"
    )
    first = order.drop_duplicates("global_batch_size").sort_values("global_batch_size")
    return {
        f"gradient_noise_scale_{row['global_batch_size']}": Estimate(
            row["value"],
            row["low"],
            row["high"],
            row["n"],
            "samples",
            row["method"],
            _DEFINITION,
            NOT_IDENTIFIED if math.isnan(row["value"]) else None,
        )
        for row in first.to_dict("records")
    }
