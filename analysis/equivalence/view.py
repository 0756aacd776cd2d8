"""What the page shows of equivalence: the choice of columns for each table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.equivalence.decompositions import reference_labels
from batchscape.analysis.equivalence.gradients import sketch_spread
from batchscape.analysis.equivalence.tost import ALPHA
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.grids import Grid
from batchscape.analysis.report.tables import GEOMETRY_HEADER, geometry_texts, setting_headers

__all__ = ["QUANTITY_LABELS", "divergence_grid", "equivalence_grid", "gradient_grid", "with_cells"]

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
    left, headers = _left(table, cells, [geometry_texts(table), table["reference"]], ["against"])
    columns: list[Iterable[str]] = [*left, table["quantity"].map(QUANTITY_LABELS)]
    n_left = len(columns)
    columns += [table["n"].astype(str)]
    columns += [table["mean_difference"].map(_short)]
    columns.append(_interval(table["low"], table["high"]))
    columns += [table["margin"].map(_plain), table["verdict"]]
    columns += [table["smallest_margin"].map(_short), table["seed_sd"].map(_short)]
    marks, footnotes = _lettered(table["reason"])
    level = 1 - 2 * ALPHA
    return Grid(
        headers=[
            *headers,
            "quantity",
            "seeds",
            "mean Δ",
            f"{level:.0%} interval",
            "margin",
            "verdict",
            "equivalent from margin",
            "sd between seeds",
        ],
        rows=[list(row) for row in zip(*columns, strict=True)],
        short_first="geometry",
        n_left=n_left,
        marks=marks,
        footnotes=footnotes,
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
    left, headers = _left(table, cells, [geometry_texts(table)], [], precision=True)
    columns: list[Iterable[str]] = [*left]
    n_left = len(columns)
    for name in ("relative_error", "relative_difference"):
        columns.append(
            [
                _with_interval(*figures)
                for figures in table[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)
            ]
        )
        columns.append(table[f"{name}_n"].astype(str))
    spread = sketch_spread(int(table["buckets"].max()))
    return Grid(
        headers=[*headers, "error against float64", "seeds", "from first decomposition", "seeds"],
        rows=[list(row) for row in zip(*columns, strict=True)],
        short_first="geometry",
        n_left=n_left,
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


def divergence_grid(table: pd.DataFrame, cells: Cells) -> Grid:
    """Choose what of the growth of differences goes on a page.

    Parameters
    ----------
    table : DataFrame
        As `growth_of_differences` returns it, `with_cells`.
    """
    left, headers = _left(table, cells, [geometry_texts(table)], [], precision=True)
    columns: list[Iterable[str]] = [*left]
    n_left = len(columns)
    columns += [table[name].map(_short) for name in ("early_rms", "late_rms")]
    columns.append(
        [
            MISSING if math.isnan(step) else f"{step:.0f} ({n} of {total})"
            for step, n, total in table[
                ["first_step_beyond", "n_beyond", "n_trajectories"]
            ].itertuples(index=False)
        ]
    )
    rates = table[["growth_rate", "growth_low", "growth_high"]].itertuples(index=False)
    columns.append([_with_interval(*figures) for figures in rates])
    beyond = _plain(float(table["beyond"].iloc[0]))
    return Grid(
        headers=[
            *headers,
            "rms Δ, first tenth",
            "rms Δ, last tenth",
            f"first step beyond {beyond}",
            "growth a step",
        ],
        rows=[list(row) for row in zip(*columns, strict=True)],
        short_first="geometry",
        n_left=n_left,
        notes=[
            "Δ: training loss minus that of the first decomposition, at the same seed and "
            "optimizer step. growth a step: slope of log |Δ| over the optimizer step, mean over "
            "seeds with its 95 % t-interval; ln 2 over it is the steps in which differences "
            "double.",
        ],
    )


def _left(
    table: pd.DataFrame,
    cells: Cells,
    first: Sequence[Iterable[str]],
    headers: Sequence[str],
    *,
    precision: bool = False,
) -> tuple[list[Iterable[str]], list[str]]:
    """Return the columns that name a row, and their headers."""
    shown = [name for name in cells.contexts if name in table]
    if precision and "precision" not in shown:
        shown.append("precision")
    columns = [*first, *(table[name].fillna(MISSING) for name in shown)]
    return columns, [GEOMETRY_HEADER, *headers, *setting_headers(shown)]


def _plain(margin: float) -> str:
    return MISSING if math.isnan(margin) else f"{margin:g}"


def _short(value: float) -> str:
    return significant(value, 2)


def _interval(low: pd.Series[float], high: pd.Series[float]) -> list[str]:
    return [
        MISSING if math.isnan(a) else f"[{_short(a)}, {_short(b)}]"
        for a, b in zip(low, high, strict=True)
    ]


def _with_interval(value: float, low: float, high: float) -> str:
    text = _short(value)
    return text if math.isnan(low) else f"{text} [{_short(low)}, {_short(high)}]"


def _lettered(texts: pd.Series[str]) -> tuple[list[list[str]], dict[str, str]]:
    """Give each distinct reason a number."""
    distinct = list(dict.fromkeys(texts.dropna()))
    letters = {text: str(index + 1) for index, text in enumerate(distinct)}
    marks = [[letters[text]] if isinstance(text, str) else [] for text in texts]
    return marks, {letter: text for text, letter in letters.items()}
