"""The tables of the comparison and of decompositions, and columns that many tables have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.best import mark_best
from batchscape.analysis.cells import RATE, UPDATE_GROUPS, Cells, geometry_label, setting_texts
from batchscape.analysis.estimates import FEWEST, LEVEL
from batchscape.analysis.joins import column_of
from batchscape.analysis.labels import setting_headers
from batchscape.analysis.numbers import TIMES, unit_of
from batchscape.analysis.report.table import Column, Table
from batchscape.errors import ConfigError
from batchscape.record.figures import COMPARED, FIGURES
from batchscape.text import count_text, suggest

GEOMETRY_HEADER = f"devices {TIMES} micro {TIMES} accumulation = global"
"""Header of a column of geometries."""

_RATIO = "throughput_ratio"
_ENDS = ("_mean", "_ci95", "_n")
_REFERENCE = "throughput_ratio_reference"
_PAIRS = "throughput_ratio_pairs"
"""The n of ratios; missing at the reference."""


def comparison_table(
    comparison: pd.DataFrame,
    cells: Cells,
    at_best: Collection[int] = (),
    figures: Sequence[str] | None = None,
) -> Table:
    """Show `compare(cells)`, the cells of `at_best` first where there is no room for all."""
    names = [name for name in comparison_figures(figures) if comparison[f"{name}_n"].gt(0).any()]
    if figures is None:
        names = [name for name in names if not _is_redundant(comparison, name)]
    marks, contests = mark_best(cells)
    marks = marks.loc[comparison.index]
    reference = comparison[_RATIO].eq(1)
    # The reference has no pairs of its own.
    frame = comparison.assign(**{_PAIRS: comparison[f"{_RATIO}_n"].mask(reference)})
    pairs = zip(comparison["n_completed"], comparison["n"], strict=True)
    counts = [
        str(n) if n_completed in {0, n} and n_completed else f"{n_completed} of {n}"
        for n_completed, n in pairs
    ]
    columns = [
        geometry_column(comparison),
        *setting_columns(comparison, cells.key_settings),
        *([] if comparison["status"].eq("completed").all() else [Column("status", is_left=True)]),
        Column("n_completed", "n", texts=counts),
        *map(_figure_column, names),
    ]
    bold = {
        (int(row), _figure_column(name).name)
        for name in names
        if name in marks
        for row in np.flatnonzero(marks[name])
    }
    definitions = [
        "n: completed runs, as '2 of 3' where other runs of the cell did not complete. Figures are "
        f"means ± half-widths of their {LEVEL:.0%} t-intervals over the completed runs only: "
        "over n runs for memory and times, over seeds for losses; (n = ...) where that n differs. "
        f"Below {FEWEST} values the mean stands alone: an interval of two says nothing.",
        _rule_of_bold(int(contests.sum()), cells),
        *(text for name in names for text in _definitions(name, comparison, cells)),
    ]
    if lacking := [name for name in figures or () if name not in names]:
        definitions.append(f"No run of these has what was asked for: {', '.join(lacking)}.")
    if unshown := cells.dependent_settings():
        definitions.append(f"Also vary, together with settings shown: {', '.join(unshown)}.")
    # A file has the ratio, unless other columns were asked for.
    unseen = {*comparison_figures(None)} - {*names, *([_RATIO] if figures is None else [])}
    ends = {_RATIO: ("", "_low", "_high", "_n")}
    hidden = [f"{name}{end}" for name in unseen for end in ends.get(name, _ENDS)]
    return Table(
        "comparison",
        "Comparison",
        frame,
        columns,
        notes=definitions,
        footnotes=_footnotes(comparison, cells),
        bold=bold,
        lead=_at_best_update(comparison, cells, at_best),
        hidden=[*hidden, _PAIRS, _REFERENCE],
    )


def _is_redundant(comparison: pd.DataFrame, name: str) -> bool:
    """Tell whether another figure says the same."""
    if name == "samples_per_s":
        return not (comparison["samples_per_s_n"].gt(0) & comparison["tokens_per_s_n"].eq(0)).any()
    # The first cell of its settings has ratio 1: alone, it says nothing.
    return name == _RATIO and not comparison[_RATIO].dropna().ne(1).any()


def _figure_column(name: str) -> Column:
    if name == _RATIO:
        ends = (f"{_RATIO}_low", f"{_RATIO}_high", "", _PAIRS, "n_completed")
        return Column(_RATIO, "throughput ratio", "", ".3f", *ends)
    return Column(
        f"{name}_mean",
        FIGURES[name].label,
        unit_of(name),
        spread=f"{name}_ci95",
        n=f"{name}_n",
        usual="n_completed",
    )


def _rule_of_bold(contests: int, cells: Cells) -> str:
    """Say what bold means, or why nothing can be."""
    if not contests:
        return "Nothing is bold: no two cells could be compared for a best, run by run."
    headers = zip(cells.contexts, setting_headers(cells.contexts), strict=True)
    labels = [cells.label_of(name) if name == RATE else header for name, header in headers]
    candidates = f"the cells of equal {', '.join(labels)}" if labels else "the cells"
    return (
        f"Bold: best in its column among {candidates}, and told from each of them: the "
        f"{LEVEL:.0%} t-interval of differences paired by seed leaves out 0, corrected for "
        f"{count_text(contests, 'such comparison')} in this table (Bonferroni). Step times "
        "are compared at one global batch size, losses after equal samples, with the "
        "decompositions of one global batch as one candidate (but for those of a program of "
        "others). Where the best cell has runs that did not complete, "
        "or is not told from another one, nothing is bold."
    )


def _definitions(name: str, comparison: pd.DataFrame, cells: Cells) -> Iterator[str]:
    """Yield the sentences that define one column of the comparison."""
    label = _figure_column(name).header
    if name == _RATIO:
        references = comparison[_REFERENCE].dropna().unique()
        first = f", {references[0]}" if len(references) == 1 else " of the same settings"
        yield (
            f"{label}: throughput over that of the first cell{first}, geometric mean over "
            f"pairs of runs with the same seed, with its {LEVEL:.0%} t-interval."
        )
    elif name != "peak_allocated_gib" or not cells.of_programs().all():
        yield f"{label}: {FIGURES[name].meaning}."
    # No allocator can be asked for the peak of a program.
    if name == "peak_allocated_gib" and cells.of_programs().any():
        yield (
            f"{label} of a program: what all its processes hold on a device, or on a processor "
            "what they share with no other process; allocated or not."
        )
    if name == "mfu_pct":
        recorded = cells.runs.dropna(subset=["peak_tflops", "peak_source"])
        ranges = recorded.groupby("peak_source")["peak_tflops"].agg(["min", "max"])
        peaks = [
            f"{' to '.join(dict.fromkeys((f'{low:.3g}', f'{high:.3g}')))} ({source})"
            for source, low, high in ranges.itertuples()
        ]
        yield (
            "Model FLOPs: matrix products and attention of one forward and backward, 2 a "
            "multiply-add, causal attention in full, padding counted like any other token, "
            "recomputation not counted; over the time in optimizer steps, without what is between "
            f"them. Peak of a device in 10^12 FLOP/s: {'; '.join(peaks)}."
        )


def _footnotes(comparison: pd.DataFrame, cells: Cells) -> list[list[str | None]]:
    """Say for each cell which of its figures are missing or cut short, and why."""
    open_status = comparison["status"].where(comparison["n_completed"].lt(comparison["n"]))
    lacks_some = comparison["step_time_s_n"].gt(0)
    timing = lacks_some.map({True: "some times left out", False: "no times"})
    is_at_target = column_of(cells.runs, "stop_reason").eq("target")
    n_at_target = is_at_target.groupby(cells.runs["cell"]).sum().reindex(comparison.index)
    return [
        comparison["reason"].where(comparison["reason"].notna(), open_status).tolist(),
        (timing + ": " + comparison["timing_note"].astype("string")).tolist(),
        ("not decomposition-invariant: " + comparison["not_invariant"].astype("string")).tolist(),
        [
            f"{count} of {n} stopped at a target loss: final losses are those there"
            if count
            else None
            for count, n in zip(n_at_target, comparison["n_completed"], strict=True)
        ],
    ]


def _at_best_update(comparison: pd.DataFrame, cells: Cells, at_best: Collection[int]) -> list[int]:
    """Return the rows whose settings of the update gave the lowest loss of their global batch.

    Cells of `at_best` are preferred, then cells whose runs all completed. One row of each global
    batch stands before the others, the smallest batch first. Empty where only one update was tried.
    """
    updates = [name for name in cells.contexts if name.startswith(UPDATE_GROUPS)]
    held_out = comparison["final_eval_loss_n"].gt(0).any()
    losses = comparison["final_eval_loss_mean" if held_out else "final_loss_mean"].dropna()
    if not updates or losses.empty:
        return []
    place = cells.by_batch()
    update = cells.table.groupby(updates, dropna=False, sort=False).ngroup()
    order = pd.DataFrame({"is_incomplete": cells.incomplete(), "loss": losses}).loc[losses.index]
    order["other"] = ~order.index.isin(list(at_best))
    order = order.sort_values(["other", "is_incomplete", "loss"], kind="stable")
    best = order.index.to_series().groupby(place[order.index]).first()
    is_best = update.eq(place.map(best.map(update)))[comparison.index]
    sizes = comparison.loc[is_best, "global_batch_size"].sort_values(kind="stable")
    rows = pd.Series(range(len(comparison)), comparison.index)[sizes.index]
    is_further = place[rows.index].duplicated()
    return [*rows[~is_further].tolist(), *rows[is_further].tolist()]


def decomposition_table(table: pd.DataFrame, cells: Cells) -> Table:
    """Show `differences_by_cell`."""
    settings = [name for name in cells.contexts if name != "precision"]
    precisions = table["precision"].fillna("unknown").unique()
    if len(precisions) > 1:
        settings.append("precision")
    return Table(
        "decompositions",
        "Differences of the training loss over all optimizer steps",
        table.assign(cell=table.index),
        [
            geometry_column(table),
            Column("reference", "against", is_left=True),
            *setting_columns(table, settings),
            Column("n_trajectories", "seeds"),
            Column("n_optimizer_steps", "paired steps"),
            Column("max_abs_difference", "max |Δ loss|", format=2),
            Column("rms_difference", "rms Δ loss", format=2),
            Column("max_relative_difference", "max |Δ loss| / loss", format=2),
            Column("seed_sd", "sd between seeds", format=2),
            Column("rms_over_seed_sd", "rms Δ / sd", format=2),
        ],
        footnotes=[table["note"]],
        hidden=["cell"],
        notes=[
            "Δ loss: training loss minus that of the first decomposition of the same trajectory, "
            "paired by seed and optimizer step, over all seeds and optimizer steps; 0 means equal "
            f"to the last bit. Arithmetic: {', '.join(precisions)}.",
            "sd between seeds: spread of the loss at the same optimizer step over seeds, root "
            "mean square over optimizer steps.",
        ],
    )


def geometry_column(table: pd.DataFrame, header: str = GEOMETRY_HEADER) -> Column:
    """Write geometries as 1x32x1=32, with `?` for a part that was never determined."""
    batch = table["global_batch_size"].astype("string").fillna("?")
    texts = geometry_label(table) + "=" + batch
    return Column("geometry", header, texts=texts, is_left=True)


def setting_columns(table: pd.DataFrame, names: Sequence[str]) -> list[Column]:
    """Return columns of settings, under short headers."""
    texts = (setting_texts(table, name) for name in names)
    headers = setting_headers(names)
    # A rate that follows from the batch is sorted by what it came to.
    keys = [
        "learning_rate" if name == RATE and "learning_rate" in table else name for name in names
    ]
    parts = zip(keys, headers, texts, strict=True)
    return [Column(key, header, texts=column, is_left=True) for key, header, column in parts]


def comparison_figures(names: Sequence[str] | None) -> Sequence[str]:
    """Return figures of the comparison, by default all in the order of the table; refuse others."""
    choices = list(COMPARED)
    choices.insert(choices.index("samples_per_s") + 1, _RATIO)
    for name in names or ():
        if name not in choices:
            raise ConfigError(
                f"--columns takes figures of the comparison, but {name!r} is none"
                f"{suggest(name, choices)}"
            )
    return choices if names is None else list(dict.fromkeys(names))
