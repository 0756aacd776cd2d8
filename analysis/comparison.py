"""The comparison: one row a cell, every figure with its mean, spread, interval and n."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pandas.api.typing import DataFrameGroupBy

from batchscape.analysis.cells import GEOMETRY, SEEDS, Cells, geometry_label
from batchscape.analysis.estimates import half_widths
from batchscape.analysis.joins import column_of
from batchscape.record.figures import COMPARED, FIGURES


def compare(cells: Cells) -> pd.DataFrame:
    """Compute the comparison table.

    Returns
    -------
    DataFrame
        One row a cell, in the order of `cells.table`: geometry, `status` (with counts where runs
        differ), the settings that tell cells apart, `n`, `n_completed` (runs), `reason` (of runs
        that did not complete), `timing_note` (why times of completed runs are left out),
        `not_invariant` (why decompositions of these runs may train unlike one another); for each
        figure of `COMPARED` its `_mean`, `_ci95` (half-width of the t-interval of the mean, from 3
        values on) and `_n`; the columns of `throughput_ratios`;
        `run_ids` and `sweep_dirs`, joined by semicolons. Figures come from completed runs only.
    """
    is_completed = cells.runs["status"].eq("completed")
    runs = cells.runs.assign(
        reason=cells.runs["reason"].where(~is_completed),
        timing_note=cells.runs["timing_note"].where(is_completed),
        not_invariant=column_of(cells.runs, "not_invariant"),
    )
    counts = pd.crosstab(runs["cell"], runs["status"])
    numbers = {"n": counts.sum(axis=1), "n_completed": is_completed.groupby(runs["cell"]).sum()}
    texts = ("reason", "timing_note", "not_invariant")
    dependent = cells.dependent_settings()
    parts = [
        cells.table[list(GEOMETRY)],
        _statuses(counts),
        cells.table[[name for name in cells.settings if name not in dependent]],
        pd.DataFrame(numbers | {name: _distinct(runs, name, " | ") for name in texts}),
        _spreads(cells),
        throughput_ratios(cells),
        pd.DataFrame({f"{name}s": _distinct(runs, name, ";") for name in ("run_id", "sweep_dir")}),
    ]
    return pd.concat(parts, axis=1).reindex(cells.table.index).copy()


def throughput_ratios(cells: Cells) -> pd.DataFrame:
    """Compare throughput with that of the first cell of the same settings and hardware.

    Runs are paired by seed and timing repeat; the ratio is the geometric mean over the pairs,
    with the t-interval of the mean logarithm.

    Returns
    -------
    DataFrame
        Indexed by `cell`: `throughput_ratio` (above 1: faster than the reference),
        `throughput_ratio_low`, `throughput_ratio_high`, `throughput_ratio_n` (pairs) and
        `throughput_ratio_reference` (its geometry; the reference itself has ratio 1 and no
        interval).
    """
    figures = cells.figures
    keys = ["context", *[name for name in (*SEEDS, "timing_repeat") if name in cells.runs]]
    pairs = cells.runs.assign(context=cells.runs["cell"].map(cells.context_of)).loc[figures.index]
    pairs["log"] = np.log(figures["tokens_per_s"].fillna(figures["samples_per_s"]))
    pairs = pairs[np.isfinite(pairs["log"])]
    pairs = pairs.groupby([*keys, "cell"], dropna=False)["log"].mean().reset_index()
    pairs["reference"] = pairs.groupby("context")["cell"].transform("min")
    base = pairs[pairs["cell"] == pairs["reference"]]
    paired = pairs.merge(base[[*keys, "log"]], on=keys, suffixes=("", "_reference"))
    groups = paired.assign(log=paired["log"] - paired["log_reference"]).groupby("cell")
    mean, n, reference = groups["log"].mean(), groups["log"].count(), groups["reference"].first()
    half = half_widths(groups["log"].std(), n).where(mean.index != reference)
    return pd.DataFrame(
        {
            "throughput_ratio": np.exp(mean),
            "throughput_ratio_low": np.exp(mean - half),
            "throughput_ratio_high": np.exp(mean + half),
            "throughput_ratio_n": n,
            "throughput_ratio_reference": reference.map(geometry_label(cells.table)),
        }
    )


def _spreads(cells: Cells) -> pd.DataFrame:
    figures = cells.figures
    losses = [name for name in COMPARED if FIGURES[name].kind == "loss"]
    costs = [name for name in COMPARED if name not in losses]
    trained = figures.groupby(["cell", "trajectory_id"])[losses].mean()
    spreads = spreads_of(trained.groupby("cell")) | spreads_of(
        figures[costs].groupby(figures["cell"])
    )
    columns = {
        f"{name}_{part}": column for name in COMPARED for part, column in spreads[name].items()
    }
    table = pd.DataFrame(columns).reindex(sorted(cells.runs["cell"].unique()))
    counts = [name for name in columns if name.endswith("_n")]
    return table.astype(dict.fromkeys(counts, "Int64")).fillna(dict.fromkeys(counts, 0))


def spreads_of(groups: DataFrameGroupBy[Any, Any]) -> dict[str, dict[str, pd.Series[Any]]]:
    """Return `mean`, `ci95` (half-width of the t-interval) and `n` of each column by group."""
    mean, sd, n = groups.mean(), groups.std(), groups.count()
    return {
        name: {"mean": mean[name], "ci95": half_widths(sd[name], n[name]), "n": n[name]}
        for name in map(str, sd)
    }


def _statuses(counts: pd.DataFrame) -> pd.Series[str]:
    # Completed runs come first, the others by name.
    names = sorted(counts.columns, key=lambda name: (name != "completed", name))
    texts = []
    for row in counts[names].to_dict("records"):
        present = {name: n for name, n in row.items() if n}
        listed = present if len(present) == 1 else [f"{name} {n}" for name, n in present.items()]
        texts.append(", ".join(map(str, listed)))
    return pd.Series(texts, index=counts.index, dtype=object, name="status")


def _distinct(runs: pd.DataFrame, name: str, separator: str) -> pd.Series[str]:
    """Join the distinct texts of each cell; None where there is none."""
    texts_by_cell: dict[int, set[str]] = {cell: set() for cell in runs["cell"].unique()}
    for cell, text in zip(runs["cell"], runs[name].to_numpy(dtype=object), strict=True):
        if isinstance(text, str) and text:
            texts_by_cell[cell].add(text)
    joined = {cell: separator.join(sorted(texts)) or None for cell, texts in texts_by_cell.items()}
    return pd.Series(joined, dtype=object)
