"""What the page shows of equivalence: the choice of columns for each table."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.equivalence.decompositions import reference_labels
from batchscape.analysis.equivalence.gradients import sketch_spread
from batchscape.analysis.equivalence.tost import ALPHA
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.grids import Column, Grid, columns_grid, lettered
from batchscape.analysis.report.tables import geometry_column, setting_columns

__all__ = ["QUANTITY_LABELS", "equivalence_grid", "gradient_grid", "with_cells"]

QUANTITY_LABELS = {
    "final_eval_loss": "eval loss",
    "final_loss": "training loss",
    "log_steps_to_target": "log steps",
}
"""What the quantities are called in tables."""


def with_cells(table: pd.DataFrame, cells: Cells) -> pd.DataFrame:
    """Put geometry, settings and precision before rows that have a cell.

    Parameters
    ----------
    table : DataFrame
        With `cell` as a column or as its index; a `reference` cell becomes its label.
    """
    rows = table.reset_index() if table.index.name == "cell" else table
    head = cells.table[[*GEOMETRY, *cells.settings]]
    if "precision" not in head:
        first = cells.runs.drop_duplicates("cell").set_index("cell")
        head = head.assign(precision=first["precision"].reindex(head.index))
    rows = rows.drop(columns=[name for name in head if name in rows])
    if "reference" in rows:
        rows = rows.assign(reference=rows["reference"].map(reference_labels(cells)))
    joined = head.merge(rows, left_index=True, right_on="cell")
    return joined.drop(columns="cell").reset_index(drop=True)


def equivalence_grid(table: pd.DataFrame, cells: Cells) -> Grid:
    """Choose what of the verdicts goes on a page.

    Parameters
    ----------
    table : DataFrame
        As `judge_equivalence` returns it, `with_cells`.
    """
    level = 1 - 2 * ALPHA
    ends = zip(table["low"], table["high"], strict=True)
    return columns_grid(
        [
            geometry_column(table),
            ("against", table["reference"]),
            *setting_columns(table, [name for name in cells.contexts if name in table]),
            ("quantity", table["quantity"].map(QUANTITY_LABELS)),
        ],
        [
            ("seeds", table["n"].astype(str)),
            ("mean Δ", map(_short, table["mean_difference"])),
            (
                f"{level:.0%} interval",
                [MISSING if math.isnan(a) else f"[{_short(a)}, {_short(b)}]" for a, b in ends],
            ),
            ("margin", map(_plain, table["margin"])),
            ("verdict", table["verdict"]),
            ("equivalent from margin", map(_short, table["smallest_margin"])),
            ("sd between seeds", map(_short, table["seed_sd"])),
        ],
        footnoted=lettered([[reason] for reason in table["reason"]]),
        notes=[
            "Δ: final held-out loss, or logarithm of the optimizer steps to the lowest target that "
            "all cuts of a global batch reached, minus that of the decomposition it is held "
            f"against, paired by seed; with its {level:.0%} t-interval over seeds.",
            "verdict: two one-sided t-tests at "
            f"{ALPHA:g}. Equivalent: the interval lies within the margin. Different: wholly beyond "
            "it. Not identified: neither, which says nothing of equality. equivalent from margin: "
            "the smallest margin that these runs would have met.",
            "That all decompositions are equivalent needs no correction for their number "
            "(intersection-union test); that one of them is different is corrected by Holm's "
            "method.",
        ],
    )


def gradient_grid(table: pd.DataFrame, cells: Cells) -> Grid:
    """Choose what of the gradients' errors goes on a page.

    Parameters
    ----------
    table : DataFrame
        As `gradient_error_table` returns it, `with_cells`.
    """
    spread = sketch_spread(int(table["buckets"].max()))
    shown: list[Column] = []
    for label, name, what in (
        ("error against float64", "relative_error", "error"),
        ("from first decomposition", "relative_difference", "difference"),
    ):
        seeds = table[f"{name}_n"]
        if seeds.gt(0).any():
            shown += [(label, _with_ends(table, name)), (f"seeds of {what}", seeds.astype(str))]
    return columns_grid(
        _left(table, cells),
        shown,
        notes=[
            "error against float64: distance of the gradient of the first optimizer step, after "
            "the exchange and before clipping, from that of the float64 run with the same seeds "
            "and settings, over the norm of the latter. from first decomposition: the same against "
            "the first decomposition of the same precision. Means over seeds with their 95 % "
            "t-interval.",
            f"Distances are estimated from sketches, each with a relative standard deviation of "
            f"{spread:.1%}; a difference of 0 is exact.",
        ],
    )


def _left(table: pd.DataFrame, cells: Cells) -> list[Column]:
    """Return the columns that name a cell, with its precision."""
    shown = [name for name in cells.contexts if name in table]
    shown += [] if "precision" in shown else ["precision"]
    return [geometry_column(table), *setting_columns(table, shown)]


def _plain(margin: float) -> str:
    return MISSING if math.isnan(margin) else f"{margin:g}"


def _short(value: float) -> str:
    return significant(value, 2)


def _with_ends(table: pd.DataFrame, name: str, ends: str | None = None) -> Iterable[str]:
    columns = [name, *(f"{ends or name}_{end}" for end in ("low", "high"))]
    for value, low, high in table[columns].itertuples(index=False):
        interval = "" if math.isnan(low) else f" [{_short(low)}, {_short(high)}]"
        yield _short(value) + interval
