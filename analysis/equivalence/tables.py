"""Tables of equivalence in the report."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.equivalence.decompositions import reference_labels
from batchscape.analysis.equivalence.gradients import sketch_spread
from batchscape.analysis.equivalence.tost import ALPHA
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import geometry_column, setting_columns

QUANTITY_LABELS = {
    "final_eval_loss": "eval loss",
    "final_loss": "training loss",
    "log_steps_to_target": "log steps",
}
"""Labels of the quantities in tables."""


def with_cells(table: pd.DataFrame, cells: Cells) -> pd.DataFrame:
    """Put geometry, settings and precision before rows that have a cell; label the reference."""
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


def equivalence_table(table: pd.DataFrame, cells: Cells, rows: Sequence[int]) -> Table:
    """Show the verdicts of `judge_equivalence`, `with_cells`, at some positions."""
    level = 1 - 2 * ALPHA
    return Table(
        "equivalence",
        "Equivalence of final losses, by two one-sided tests",
        table,
        [
            geometry_column(table),
            Column("reference", "against", is_left=True),
            *setting_columns(table, [name for name in cells.contexts if name in table]),
            Column("quantity", words=QUANTITY_LABELS, is_left=True),
            Column("n", "seeds"),
            Column("mean_difference", "mean Δ", format=2, low="low", high="high"),
            Column("margin", format="g"),
            Column("verdict"),
            Column("smallest_margin", "equivalent from margin", format=2),
            Column("seed_sd", "sd between seeds", format=2),
        ],
        rows,
        footnotes=[table["reason"]],
        notes=[
            "Δ: final held-out loss, or logarithm of the optimizer steps to the lowest target that "
            "all cuts of a global batch reached, minus that of the reference decomposition, "
            f"paired by seed; with its {level:.0%} t-interval over seeds.",
            "verdict: two one-sided t-tests at "
            f"{ALPHA:g}. Equivalent: the interval lies within the margin. Different: wholly beyond "
            "it. Not identified: neither, which says nothing of equality. equivalent from margin: "
            "the smallest margin that these runs would have met.",
            "That all decompositions are equivalent needs no correction for their number "
            "(intersection-union test); that one of them is different is corrected by Holm's "
            "method.",
        ],
    )


def gradient_table(table: pd.DataFrame, cells: Cells) -> Table:
    """Show the errors of `gradient_error_table`, `with_cells`."""
    spread = sketch_spread(int(table["buckets"].max()))
    settings = [name for name in cells.contexts if name in table]
    settings += [] if "precision" in settings else ["precision"]
    columns = [geometry_column(table), *setting_columns(table, settings)]
    for label, name, word in (
        ("error against float64", "relative_error", "error"),
        ("from first decomposition", "relative_difference", "difference"),
    ):
        if table[f"{name}_n"].gt(0).any():
            columns.append(Column(name, label, "", 2, f"{name}_low", f"{name}_high"))
            columns.append(Column(f"{name}_n", f"seeds of {word}"))
    return Table(
        "gradient_errors",
        "Relative error of the first gradient",
        table,
        columns,
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
