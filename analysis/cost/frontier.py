"""Where memory ends: the last micro-batch that fit, and the first one that ran out of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    outcome = runs["status"].map(_OUTCOMES)
    cause = column_of(runs, "cause")
    outcome = outcome.mask(runs["status"].eq("rejected") & cause.eq("out_of_memory"), SKIPPED)
    has_outcome = outcome.notna() & runs[_MICRO].notna()
    groups = cost_groups(cells).reindex(runs["cell"]).set_axis(runs.index)
    rows = runs[["data_parallel_size", _MICRO, _ACCUMULATION, "run_id"]]
    columns = [groups, rows, peaks_of_runs(runs)]
    table = pd.concat(columns, axis=1).assign(outcome=outcome, memory_gib=memory_of_ranks(runs))
    return table[has_outcome].reset_index(drop=True)


def memory_frontier(rows: pd.DataFrame) -> pd.DataFrame:
    """Find the frontier of every setting and number of devices, of the rows of `frontier_rows`."""
    frontiers = []
    for key, rows_of_setting in rows.groupby(_SETTING, sort=True, dropna=False):
        frontiers.append(dict(zip(_SETTING, key, strict=True)) | find_frontier(rows_of_setting))
    return pd.DataFrame(frontiers)


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
        `is_monotone`: whether no run fit that takes more than one that ran out (a larger
        micro-batch, with accumulation if that one accumulated) and none that takes the same.
        `note`, and `fits`, `ran_out`, `not_launched`: micro-batches, separated by semicolons;
        `last_fit_run_ids`, `first_out_run_ids`.
    """
    fit, out, skipped = (rows[rows["outcome"].eq(name)] for name in (FIT, OUT, SKIPPED))
    first_out = int(out[_MICRO].min()) if len(out) else None
    below = fit if first_out is None else fit[fit[_MICRO] < first_out]
    last_fit = int(below[_MICRO].max()) if len(below) else None
    at_last = below[below[_MICRO].eq(last_fit)] if last_fit is not None else below
    at_first = out[out[_MICRO].eq(first_out)] if first_out is not None else out
    memory = float((at_last if len(at_last) else at_first)["memory_gib"].min())
    peak = float(at_last["peak_gib"].max())
    figures = at_last["peak_figure"].dropna().unique()
    margin = memory - peak if peak <= memory else math.nan
    contradictions = _contradictions(fit, out)
    notes = [*_unidentified(fit, out), *contradictions, *_explained(fit, out)]
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
        "n_skipped": len(skipped),
        "memory_gib": memory,
        "peak_gib": peak,
        "peak_figure": figures[0] if len(figures) == 1 else None,
        "margin_gib": margin,
        "margin_pct": 100 * margin / memory if memory else math.nan,
        "is_monotone": not contradictions,
        "note": "; ".join(notes),
        "fits": _sizes(fit),
        "ran_out": _sizes(out),
        "not_launched": _sizes(skipped),
        "last_fit_run_ids": ";".join(sorted(at_last["run_id"])),
        "first_out_run_ids": ";".join(sorted(at_first["run_id"])),
    }


def _unidentified(fit: pd.DataFrame, out: pd.DataFrame) -> Iterable[str]:
    if fit.empty and out.empty:
        yield f"{NOT_IDENTIFIED}: no run that was launched fit, and none ran out of memory"
    elif out.empty:
        yield f"{NOT_IDENTIFIED}: none ran out of memory, up to micro-batch {fit[_MICRO].max()}"
    elif fit.empty:
        yield f"{NOT_IDENTIFIED}: none fit, down to micro-batch {out[_MICRO].min()}"
    elif fit[_MICRO].min() >= out[_MICRO].min():
        yield f"{NOT_IDENTIFIED}: none fit below micro-batch {out[_MICRO].min()}, which ran out"


def _contradictions(fit: pd.DataFrame, out: pd.DataFrame) -> list[str]:
    """Name runs that fit although an equal or smaller one ran out."""
    sentences = []
    pairs = _cuts(fit).merge(_cuts(out), how="cross", suffixes=("", "_out"))
    is_comparable = pairs[f"{_ACCUMULATION}_out"].eq(1) | pairs[_ACCUMULATION].gt(1)
    larger_pairs = pairs[is_comparable & (pairs[_MICRO] > pairs[f"{_MICRO}_out"])]
    if len(larger_pairs):
        sentences.append(
            f"not monotone: micro-batch {_listed(larger_pairs[_MICRO])} fit, though "
            f"{_listed(larger_pairs[f'{_MICRO}_out'])} ran out"
        )
    is_same_kind = pairs[_ACCUMULATION].gt(1) == pairs[f"{_ACCUMULATION}_out"].gt(1)
    for micro in sorted(
        pairs.loc[is_same_kind & pairs[_MICRO].eq(pairs[f"{_MICRO}_out"]), _MICRO].unique()
    ):
        n_out, n_fit = int(out[_MICRO].eq(micro).sum()), int(fit[_MICRO].eq(micro).sum())
        sentences.append(
            f"at the edge: micro-batch {micro} ran out in {n_out} of {n_out + n_fit} runs"
        )
    return sentences


def _explained(fit: pd.DataFrame, out: pd.DataFrame) -> Iterable[str]:
    """Name larger micro-batches that fit because they kept no gradients between micro-steps."""
    plain, accumulated = fit[fit[_ACCUMULATION].eq(1)], out[out[_ACCUMULATION].gt(1)]
    pairs = _cuts(plain).merge(_cuts(accumulated), how="cross", suffixes=("", "_out"))
    larger_pairs = pairs[pairs[_MICRO] >= pairs[f"{_MICRO}_out"]]
    if len(larger_pairs):
        yield (
            f"micro-batch {_listed(larger_pairs[_MICRO])} fit without accumulation, "
            f"{_listed(larger_pairs[f'{_MICRO}_out'])} ran out with it"
        )


def _cuts(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[[_MICRO, _ACCUMULATION]].astype(int).drop_duplicates()


def _sizes(rows: pd.DataFrame) -> str:
    return ";".join(str(size) for size in sorted(rows[_MICRO].astype(int).unique()))


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(sizes))))
