"""Where memory ends: the last micro-batch that fit, and the first one that ran out of it."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.capacity import memory_of_ranks, peaks_of_runs
from batchscape.analysis.cost.table import cost_groups
from batchscape.analysis.estimates import NOT_IDENTIFIED
from batchscape.analysis.joins import column_of

FIT, OUT, SKIPPED = "fit", "ran out", "not launched"
"""Outcomes of a run: whether its micro-batch fit the memory."""

_OUTCOMES = {"completed": FIT, "diverged": FIT, "pruned": FIT, "oom": OUT}
_MICRO, _ACCUMULATION = "micro_batch_size", "gradient_accumulation_steps"
_SETTING = ["group", "group_label", "data_parallel_size"]


def frontier_rows(cells: Cells) -> pd.DataFrame:
    """Collect a row a run that fit, ran out of memory, or was skipped since a smaller one did."""
    runs = cells.runs
    is_skipped = runs["status"].eq("rejected") & column_of(runs, "cause").eq("out_of_memory")
    outcome = runs["status"].map(_OUTCOMES).mask(is_skipped, SKIPPED)
    table = runs[["cell", "data_parallel_size", _MICRO, _ACCUMULATION, "run_id"]]
    table = table.join(cost_groups(cells), on="cell").join(peaks_of_runs(runs))
    table = table.assign(outcome=outcome, memory_gib=memory_of_ranks(runs)).drop(columns="cell")
    return table[outcome.notna() & table[_MICRO].notna()].reset_index(drop=True)


def memory_frontier(rows: pd.DataFrame) -> pd.DataFrame:
    """Find the frontier of every setting and number of devices, of the rows of `frontier_rows`."""
    return pd.DataFrame(
        dict(zip(_SETTING, key, strict=True)) | find_frontier(rows_of_setting)
        for key, rows_of_setting in rows.groupby(_SETTING, sort=True, dropna=False)
    )


def find_frontier(rows: pd.DataFrame) -> dict[str, Any]:
    """Find the frontier of one setting.

    Parameters
    ----------
    rows : DataFrame
        `micro_batch_size`, `gradient_accumulation_steps`, `outcome`, `memory_gib`, `peak_gib`,
        `peak_figure` and `run_id`.

    Returns
    -------
    dict
        `last_fit`: the largest micro-batch that fit and is smaller than every one that ran out of
        memory; `first_out`: the smallest that ran out. None where there is none; `identified` says
        whether both are known. `n_fit`, `n_out`, `n_skipped`: runs that fit, ran out, and were not
        launched. `memory_gib` of a rank, `peak_gib` (largest) of `peak_figure` at the last fit, and
        the margin between them: `margin_gib`, and `margin_pct` of the memory; NaN where unknown,
        also where the peak is above the memory, so that the two are not of one kind.
        `is_monotone`: whether no run fit that takes as much as one that ran out, or more (as large
        a micro-batch, with accumulation if that one accumulated). `note`; `last_fit_run_ids`,
        `first_out_run_ids`.
    """
    fit, out = (rows[rows["outcome"].eq(name)] for name in (FIT, OUT))
    first_out = int(out[_MICRO].min()) if len(out) else None
    below = fit if first_out is None else fit[fit[_MICRO] < first_out]
    last_fit = int(below[_MICRO].max()) if len(below) else None
    at_last, at_first = below[below[_MICRO] == last_fit], out[out[_MICRO] == first_out]
    memory = float((at_last if len(at_last) else at_first)["memory_gib"].min())
    peak = float(at_last["peak_gib"].max())
    figures = at_last["peak_figure"].dropna().unique()
    margin = memory - peak if peak <= memory else math.nan
    notes = []
    if first_out is None or last_fit is None:
        why = "no run that was launched fit, and none ran out of memory"
        if len(below):
            why = f"none ran out of memory, up to micro-batch {last_fit}"
        elif len(fit):
            why = f"none fit below micro-batch {first_out}, which ran out"
        elif len(out):
            why = f"none fit, down to micro-batch {first_out}"
        notes.append(f"{NOT_IDENTIFIED}: {why}")
    pairs = fit.merge(out, how="cross", suffixes=("", "_out"))
    pairs = pairs[pairs[_MICRO] >= pairs[f"{_MICRO}_out"]]
    # Gradients kept between micro-steps take memory, so that less fits with accumulation.
    is_explained = pairs[_ACCUMULATION].eq(1) & pairs[f"{_ACCUMULATION}_out"].gt(1)
    is_equal = pairs[_MICRO].eq(pairs[f"{_MICRO}_out"]) & ~is_explained
    for chosen, text in (
        (pairs[is_equal], "not monotone: micro-batch {} fit in one run and ran out in another"),
        (pairs[~is_explained & ~is_equal], "not monotone: micro-batch {} fit, though {} ran out"),
        (pairs[is_explained], "micro-batch {} fit without accumulation, {} ran out with it"),
    ):
        if len(chosen):
            sizes = (sorted(chosen[name].unique()) for name in (_MICRO, f"{_MICRO}_out"))
            notes.append(text.format(*(", ".join(map(str, listed)) for listed in sizes)))
    if peak > memory:
        notes.append(
            f"margin {NOT_IDENTIFIED}: the recorded peak is above the memory, so that it counts "
            "what the memory does not"
        )
    return {
        "last_fit": last_fit,
        "first_out": first_out,
        "identified": last_fit is not None and first_out is not None,
        "n_fit": len(fit),
        "n_out": len(out),
        "n_skipped": int(rows["outcome"].eq(SKIPPED).sum()),
        "memory_gib": memory,
        "peak_gib": peak,
        "peak_figure": figures[0] if len(figures) == 1 else None,
        "margin_gib": margin,
        "margin_pct": 100 * margin / memory if memory else math.nan,
        "is_monotone": bool(is_explained.all()),
        "note": "; ".join(notes),
        "last_fit_run_ids": ";".join(sorted(at_last["run_id"])),
        "first_out_run_ids": ";".join(sorted(at_first["run_id"])),
    }
