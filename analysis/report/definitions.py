"""What stands under the comparison: footnotes, and how its figures are defined."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from batchscape.analysis.best import SIGNIFICANCE
from batchscape.analysis.cells import RATE, Cells
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.labels import setting_headers
from batchscape.text import count_text

__all__ = ["footnotes", "peaks", "ratio_definition", "rule_of_bold"]


def _compared_cells(cells: Cells) -> str:
    """Name the cells among which one can be best."""
    named = zip(cells.contexts, setting_headers(cells.contexts), strict=True)
    labels = [cells.label_of(name) if name == RATE else header for name, header in named]
    return f"the cells of equal {', '.join(labels)}" if labels else "the cells"


def rule_of_bold(marks: pd.DataFrame, cells: Cells) -> str:
    """Say what bold means, or why nothing can be.

    Parameters
    ----------
    marks : DataFrame
        As `mark_best` returns it.
    """
    count = int(marks["best_comparisons"].max())
    if not count:
        return "Nothing is bold: no two cells could be compared for a best, run by run."
    return (
        f"Bold: best in its column among {_compared_cells(cells)}, and told from each of them: "
        "two-sided t-tests of differences paired by seed, of which the largest p value counts, "
        f"below {SIGNIFICANCE:g} after Holm's adjustment for "
        f"{count_text(count, 'such comparison')} in this table. Step times "
        "are compared at one global batch size, losses after equal samples, with the "
        "decompositions of one global batch as one candidate (but for those of a program of "
        "others). Where the best cell has runs that did not complete, "
        "or is not told from another one, nothing is bold."
    )


def peaks(cells: Cells) -> str:
    """Say what the peaks behind MFU are, and what is counted."""
    known = cells.runs.dropna(subset=["peak_tflops", "peak_source"])
    peaks = "; ".join(
        "{} ({})".format(" to ".join(dict.fromkeys((f"{low:.3g}", f"{high:.3g}"))), source)
        for source, low, high in known.groupby("peak_source")["peak_tflops"]
        .agg(["min", "max"])
        .itertuples()
    )
    return (
        "Model FLOPs: matrix products and attention of one forward and backward, 2 a "
        "multiply-add, causal attention in full, padding counted like any other token, "
        "recomputation not counted; over the time in optimizer steps, without what is between "
        f"them. Peak of a device in 10^12 FLOP/s: {peaks}."
    )


def ratio_definition(ratios: pd.DataFrame) -> str:
    """Say what throughput is compared with.

    Parameters
    ----------
    ratios : DataFrame
        As `throughput_ratios` returns it.
    """
    references = ratios["throughput_ratio_reference"].dropna().unique()
    first = f", {references[0]}" if len(references) == 1 else " of the same settings"
    return (
        f"throughput ratio: throughput over that of the first cell{first}, geometric mean over "
        f"pairs of runs with the same seed, with its {LEVEL:.0%} t-interval."
    )


def footnotes(comparison: pd.DataFrame, cells: Cells) -> list[list[str | None]]:
    """Say for each cell what its figures lack."""
    open_ended = comparison["status"].where(comparison["n_completed"].lt(comparison["n"]))
    lacking = ["some times left out" if n else "no times" for n in comparison["step_time_s_n"]]
    return [
        comparison["reason"].where(comparison["reason"].notna(), open_ended).tolist(),
        _noted(lacking, comparison["timing_note"]),
        _noted(["not decomposition-invariant"] * len(comparison), comparison["not_invariant"]),
        _stopped_at_target(comparison, cells),
    ]


def _noted(what: Sequence[str], notes: pd.Series[str]) -> list[str | None]:
    return [
        None if pd.isna(note) else f"{of}: {note}" for of, note in zip(what, notes, strict=True)
    ]


def _stopped_at_target(comparison: pd.DataFrame, cells: Cells) -> list[str | None]:
    """Say where final losses are cut short: such a run tells no loss at the end of its budget."""
    stopped = cells.runs.reindex(columns=["stop_reason"])["stop_reason"].eq("target")
    counts = stopped.groupby(cells.runs["cell"]).sum().reindex(comparison.index)
    pairs = zip(counts, comparison["n_completed"], strict=True)
    return [
        f"{count} of {n} stopped at a target loss: final losses are those there" if count else None
        for count, n in pairs
    ]
