"""The tables of the comparison and of decompositions, and columns that many tables have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.best import mark_best
from batchscape.analysis.cells import GEOMETRY, OF_THE_UPDATE, RATE, Cells, setting_texts
from batchscape.analysis.comparison import (
    DISTURBED,
    recorded_columns,
    throughput_ratios,
    valid_figures,
)
from batchscape.analysis.estimates import FEWEST, LEVEL
from batchscape.analysis.labels import setting_headers
from batchscape.analysis.numbers import TIMES, unit_of
from batchscape.analysis.report.definitions import (
    footnotes,
    peaks,
    ratio_definition,
    rule_of_bold,
)
from batchscape.analysis.report.table import Column, Table
from batchscape.errors import ConfigError
from batchscape.record.figures import COMPARED, FIGURES
from batchscape.text import suggest

__all__ = [
    "GEOMETRY_HEADER",
    "comparison_table",
    "decomposition_table",
    "figures_shown",
    "geometry_column",
    "setting_columns",
]

GEOMETRY_HEADER = f"devices {TIMES} micro {TIMES} accumulation = global"
"""Header of a column of geometries."""

_RATIO = "throughput_ratio"
_PAIRS = "throughput_ratio_pairs"
"""The n of ratios; missing at the reference."""

_OF_DISTURBED = (
    f"disturbed: processor time: {FIGURES['processor_time_s'].meaning}, of cells of which no time "
    "counts. A hint, and no step time: waits for a core, for samples and for other ranks are not "
    "in it, and it is longer where other work shares caches. It is in no ratio, test or claim."
)


def comparison_table(
    comparison: pd.DataFrame,
    cells: Cells,
    at_best: Collection[int] = (),
    figures: Sequence[str] | None = None,
) -> Table:
    """Choose what of the comparison is shown.

    Parameters
    ----------
    comparison : DataFrame
        As `compare` returns it.
    cells : Cells
        What it was computed from.
    at_best : collection of int
        Cells to show first where there is no room for all, as `cells_at_best` returns them.
    figures : sequence of str, optional
        Those that are shown, in this order; by default all that say anything.
    """
    shown = [name for name in figures_shown(figures) if comparison[f"{name}_n"].gt(0).any()]
    if figures is None:
        shown = [name for name in shown if _says_more(comparison, name)]
    marks = mark_best(cells, valid_figures(cells.runs)).loc[comparison.index]
    reference = comparison[_RATIO].eq(1)
    # The reference has no pairs of its own.
    frame = comparison.assign(**{_PAIRS: comparison[f"{_RATIO}_n"].mask(reference)})
    columns = [
        geometry_column(comparison),
        *setting_columns(comparison, cells.shown),
        *([] if comparison["status"].eq("completed").all() else [Column("status", is_left=True)]),
        Column("n_completed", "n", texts=_counts(comparison)),
    ]
    definitions = [
        "n: completed runs, as '2 of 3' where other runs of the cell did not complete. Figures are "
        f"means ± half-widths of their {LEVEL:.0%} t-intervals over the completed runs only: "
        "over n runs for memory and times, over seeds for losses; (n = ...) where that n differs. "
        f"Below {FEWEST} values the mean stands alone: an interval of two says nothing.",
        rule_of_bold(marks, cells),
    ]
    bold: set[tuple[int, str]] = set()
    # What no cell has is no column; the notes of the report say why there are no times.
    for name in shown:
        column = _column(name)
        columns.append(column)
        if f"{name}_best" in marks:
            bold |= {(int(row), column.name) for row in np.flatnonzero(marks[f"{name}_best"])}
        if name == _RATIO:
            definitions.append(ratio_definition(throughput_ratios(cells)))
        elif name == DISTURBED:
            definitions.append(_OF_DISTURBED)
        elif name == "peak_allocated_gib":
            definitions += _of_memory(column.header, cells)
        else:
            definitions.append(f"{column.header}: {FIGURES[name].meaning}.")
        if name == "mfu_pct":
            definitions.append(peaks(cells))
    if lacking := [name for name in figures or () if name not in shown]:
        definitions.append(f"No run of these has what was asked for: {', '.join(lacking)}.")
    if unshown := cells.unshown():
        definitions.append(f"Also vary, together with settings shown: {', '.join(unshown)}.")
    return Table(
        "comparison",
        "Comparison",
        frame,
        columns,
        notes=definitions,
        footnotes=footnotes(comparison, cells),
        bold=bold,
        lead=_at_best_update(comparison, cells, at_best),
        hidden=[*comparison.columns.difference(recorded_columns(comparison).columns), _PAIRS],
    )


def _at_best_update(comparison: pd.DataFrame, cells: Cells, at_best: Collection[int]) -> list[int]:
    """Return the rows that share the settings of the update with the lowest loss of their batch.

    Of each global batch, and of what else differs, and first among cells at the best learning
    rate, then those whose runs all completed; none where one update is all there is. One row of
    each global batch stands before the others, the smallest batch first.
    """
    apart = [name for name in cells.contexts if not name.startswith(OF_THE_UPDATE)]
    updates = [name for name in cells.contexts if name not in apart]
    held_out = comparison["final_eval_loss_n"].gt(0).any()
    losses = comparison["final_eval_loss_mean" if held_out else "final_loss_mean"].dropna()
    if not updates or losses.empty:
        return []
    texts = cells.table[["global_batch_size", *apart]].astype(str)
    place = texts.groupby(list(texts), sort=False).ngroup()
    update = cells.table.groupby(updates, dropna=False, sort=False).ngroup()
    order = pd.DataFrame({"survivors": cells.incomplete(), "loss": losses}).loc[losses.index]
    order["other"] = ~order.index.isin(list(at_best))
    order = order.sort_values(["other", "survivors", "loss"], kind="stable")
    best = pd.Series(order.index, order.index).groupby(place.loc[order.index]).first()
    wanted = place.map(best.map(update))
    rows = np.flatnonzero(update.eq(wanted).loc[comparison.index])
    sizes = comparison["global_batch_size"].iloc[rows].to_numpy(dtype=float, na_value=np.nan)
    rows = rows[np.argsort(sizes, kind="stable")]
    is_further = place.loc[comparison.index].iloc[rows].duplicated().to_numpy()
    return [*rows[~is_further].tolist(), *rows[is_further].tolist()]


def _of_memory(label: str, cells: Cells) -> Iterator[str]:
    """Say what the peak of memory is: of a program no allocator can be asked."""
    of_programs = cells.of_programs()
    if not of_programs.all():
        yield f"{label}: {FIGURES['peak_allocated_gib'].meaning}."
    if of_programs.any():
        yield (
            f"{label} of a program: what all its processes hold on a device, or on a processor "
            "what they share with no other process; allocated or not."
        )


def decomposition_table(table: pd.DataFrame, cells: Cells) -> Table:
    """Choose what of the differences between decompositions is shown.

    Parameters
    ----------
    table : DataFrame
        As `compare_decompositions` returns it.
    cells : Cells
        What it was computed from.
    """
    settings = [name for name in cells.contexts if name != "precision"]
    precisions = table["precision"].fillna("unknown").unique()
    if len(precisions) > 1:
        settings.append("precision")
    return Table(
        "decompositions",
        "Differences of the training loss over all optimizer steps",
        table,
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
        notes=[
            "Δ loss: training loss minus that of the first decomposition of the same trajectory, "
            "paired by seed and optimizer step, over all seeds and optimizer steps; 0 means equal "
            f"to the last bit. Arithmetic: {', '.join(precisions)}.",
            "sd between seeds: spread of the loss at the same optimizer step over seeds, root "
            "mean square over optimizer steps.",
        ],
    )


def geometry_column(table: pd.DataFrame, header: str = GEOMETRY_HEADER) -> Column:
    """Write geometries as 1x32x1=32, `?` where a part was never determined."""
    parts = [table[name].astype("string").fillna("?") for name in GEOMETRY]
    texts = parts[0] + TIMES + parts[1] + TIMES + parts[2] + "=" + parts[3]
    return Column("geometry", header, texts=texts, is_left=True)


def setting_columns(table: pd.DataFrame, names: Sequence[str]) -> list[Column]:
    """Return columns of settings, under short headers."""
    texts = (setting_texts(table, name) for name in names)
    headers = setting_headers(names)
    # A rate that follows from the batch is sorted by what it came to.
    keys = [
        "learning_rate" if name == RATE and "learning_rate" in table else name for name in names
    ]
    columns = zip(keys, headers, texts, strict=True)
    return [Column(key, header, texts=own, is_left=True) for key, header, own in columns]


def figures_shown(columns: Sequence[str] | None) -> Sequence[str]:
    """Return the figures of a comparison: those asked for, else all, in the order of the table.

    Raises
    ------
    ConfigError
        If one that is asked for is no figure of the comparison.
    """
    after = {"step_time_s": [DISTURBED], "samples_per_s": [_RATIO]}
    known = [name for figure in COMPARED for name in (figure, *after.get(figure, ()))]
    for name in columns or ():
        if name not in known:
            msg = (
                f"--columns takes figures of the comparison, but {name!r} is none"
                f"{suggest(name, known)}"
            )
            raise ConfigError(msg)
    return known if columns is None else list(dict.fromkeys(columns))


def _says_more(comparison: pd.DataFrame, name: str) -> bool:
    """Tell whether a figure says anything that another one does not."""
    if name == "samples_per_s":
        return bool(
            (comparison["samples_per_s_n"].gt(0) & comparison["tokens_per_s_n"].eq(0)).any()
        )
    # The first cell of its settings has ratio 1: alone, it says nothing.
    return name != _RATIO or bool(comparison[_RATIO].dropna().ne(1).any())


def _column(name: str) -> Column:
    if name == _RATIO:
        ends = (f"{_RATIO}_low", f"{_RATIO}_high", "", _PAIRS, "n_completed")
        return Column(_RATIO, "throughput ratio", "", ".3f", *ends)
    return Column(
        f"{name}_mean",
        "disturbed: processor time" if name == DISTURBED else FIGURES[name].label,
        unit_of(name),
        spread=f"{name}_ci95",
        n=f"{name}_n",
        usual="n_completed",
    )


def _counts(comparison: pd.DataFrame) -> list[str]:
    pairs = zip(comparison["n_completed"], comparison["n"], strict=True)
    return [str(n) if done in {0, n} and done else f"{done} of {n}" for done, n in pairs]
