"""What the comparison and decomposition tables show, and their files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from batchscape.analysis.best import mark_best
from batchscape.analysis.cells import GEOMETRY, OF_THE_UPDATE, Cells, setting_texts
from batchscape.analysis.comparison import DISTURBED, throughput_ratios, valid_figures
from batchscape.analysis.estimates import FEWEST, LEVEL
from batchscape.analysis.labels import setting_headers
from batchscape.analysis.numbers import (
    MISSING,
    TIMES,
    Scale,
    scale_of,
    significant,
    time_scale,
    with_spread,
)
from batchscape.analysis.report.definitions import (
    footnotes,
    peaks,
    ratio_definition,
    rule_of_bold,
)
from batchscape.analysis.report.grids import (
    GEOMETRY_HEADER,
    Column,
    Grid,
    columns_grid,
    lettered,
)
from batchscape.outgoing import outgoing_cell
from batchscape.record.figures import COMPARED, FIGURES

__all__ = [
    "comparison_grid",
    "decomposition_grid",
    "geometry_column",
    "setting_columns",
    "write_csv",
]

_OF_DISTURBED = (
    f"disturbed: processor time: {FIGURES['processor_time_s'].meaning}, of cells of which no time "
    "counts. A hint, and no step time: waits for a core, for samples and for other ranks are not "
    "in it, and it is longer where other work shares caches. It is in no ratio, test or claim."
)


def comparison_grid(comparison: pd.DataFrame, cells: Cells, at_best: Collection[int] = ()) -> Grid:
    """Choose what of the comparison goes on a page.

    Parameters
    ----------
    comparison : DataFrame
        As `compare` returns it.
    cells : Cells
        What it was computed from.
    at_best : collection of int
        Cells to show first where there is no room for all, as `cells_at_best` returns them.
    """
    marks = mark_best(cells, valid_figures(cells.runs)).loc[comparison.index]
    left = [
        geometry_column(comparison),
        *setting_columns(comparison, cells.shown),
        ("status", comparison["status"]),
    ]
    right: list[Column] = [("n", _counts(comparison))]
    definitions = [
        "n: completed runs, as '2 of 3' where other runs of the cell did not complete. Figures are "
        f"means ± half-widths of their {LEVEL:.0%} t-intervals over the completed runs only: "
        "over n runs for memory and times, over seeds for losses; (n=...) where that n differs. "
        f"Below {FEWEST} values the mean stands alone: an interval of two says nothing.",
        rule_of_bold(marks, cells),
    ]
    bold: set[tuple[int, int]] = set()
    spare = {"status", "throughput ratio"}
    for name, label, scale in _figures(comparison):
        # What no cell has is no column; the notes below say why there are no times.
        if comparison[f"{name}_n"].eq(0).all():
            continue
        if f"{name}_best" in marks:
            rows = marks[f"{name}_best"].to_numpy(dtype=bool).nonzero()[0]
            bold |= {(int(row), len(left) + len(right)) for row in rows}
        if name == "throughput_ratio":
            right.append(("throughput ratio", _ratios(comparison)))
            definitions.append(ratio_definition(throughput_ratios(cells)))
            continue
        header = f"{label} ({scale.unit})" if scale.unit else label
        right.append((header, _spread_texts(comparison, name, scale)))
        if name == DISTURBED:
            spare.add(label)
            definitions.append(_OF_DISTURBED)
        elif name == "peak_allocated_gib":
            definitions += _of_memory(label, cells)
        else:
            definitions.append(f"{label}: {FIGURES[name].meaning}.")
        if name == "mfu_pct":
            definitions.append(peaks(cells))
    if unshown := cells.unshown():
        definitions.append(f"Also vary, together with settings shown: {', '.join(unshown)}.")
    return columns_grid(
        left,
        right,
        notes=definitions,
        footnoted=footnotes(comparison, cells),
        bold=frozenset(bold),
        lead=_at_best_update(comparison, cells, at_best),
        spare=spare,
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


def decomposition_grid(table: pd.DataFrame, cells: Cells) -> Grid:
    """Choose what of the decomposition table goes on a page.

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
    figures = {
        "max_abs_difference": "max |Δ loss|",
        "rms_difference": "rms Δ loss",
        "max_relative_difference": "max |Δ loss| / loss",
        "seed_sd": "sd between seeds",
        "rms_over_seed_sd": "rms Δ / sd",
    }
    counts = {"n_trajectories": "seeds", "n_optimizer_steps": "paired steps"}
    return columns_grid(
        [
            geometry_column(table),
            ("against", table["reference"]),
            *setting_columns(table, settings),
        ],
        [
            *((header, table[name].astype(str)) for name, header in counts.items()),
            *((h, [significant(v, 2) for v in table[name]]) for name, h in figures.items()),
        ],
        footnoted=lettered([[note] for note in table["note"]]),
        notes=[
            "Δ loss: training loss minus that of the first decomposition of the same trajectory, "
            "paired by seed and optimizer step, over all seeds and optimizer steps; 0 means equal "
            f"to the last bit. Arithmetic: {', '.join(precisions)}.",
            "sd between seeds: spread of the loss at the same optimizer step over seeds, root "
            "mean square over optimizer steps.",
        ],
    )


def geometry_column(table: pd.DataFrame) -> Column:
    """Write geometries as 1x32x1=32, `?` where a part was never determined."""
    parts = [table[name].astype("string").fillna("?") for name in GEOMETRY]
    return GEOMETRY_HEADER, parts[0] + TIMES + parts[1] + TIMES + parts[2] + "=" + parts[3]


def setting_columns(table: pd.DataFrame, names: Sequence[str]) -> list[Column]:
    """Return columns of settings, under short headers."""
    texts = (setting_texts(table, name) for name in names)
    return list(zip(setting_headers(names), texts, strict=True))


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV; numbers as they are, texts as `outgoing_cell` makes them."""
    texts = table.copy(deep=False)
    texts.columns = pd.Index([outgoing_cell(str(name)) for name in table.columns])
    for index, dtype in enumerate(table.dtypes):
        if pd.api.types.is_numeric_dtype(dtype):
            continue
        cells = table.iloc[:, index].tolist()
        clean = {text: outgoing_cell(text) for text in set(filter(_is_text, cells))}
        if any(text != cleaned for text, cleaned in clean.items()):
            texts.isetitem(index, [clean[cell] if _is_text(cell) else cell for cell in cells])
    texts.to_csv(path, index=False)


def _is_text(cell: object) -> bool:
    return isinstance(cell, str)


def _figures(comparison: pd.DataFrame) -> Iterator[tuple[str, str, Scale]]:
    """Yield name, label and unit of the figures that this comparison shows."""
    without_tokens = comparison["samples_per_s_n"].gt(0) & comparison["tokens_per_s_n"].eq(0)
    for name in COMPARED:
        if name != "samples_per_s" or without_tokens.any():
            yield name, FIGURES[name].label, scale_of(name, comparison[f"{name}_mean"])
        if name == "step_time_s":
            scale = time_scale(comparison[f"{DISTURBED}_mean"])
            yield DISTURBED, "disturbed: processor time", scale
        # The first cell of its settings has ratio 1: alone, it says nothing.
        if name == "samples_per_s" and comparison["throughput_ratio"].dropna().ne(1).any():
            yield "throughput_ratio", "ratio", Scale("", 1.0)


def _spread_texts(comparison: pd.DataFrame, name: str, scale: Scale) -> list[str]:
    texts = []
    usual = comparison["n_completed"]
    parts = (comparison[f"{name}_{part}"] for part in ("mean", "ci95", "n"))
    for mean, half_width, n, expected in zip(*parts, usual, strict=True):
        text = with_spread(mean * scale.factor, half_width * scale.factor)
        texts.append(f"{text} (n={n})" if 0 < n != expected else text)
    return texts


def _counts(comparison: pd.DataFrame) -> list[str]:
    pairs = zip(comparison["n_completed"], comparison["n"], strict=True)
    return [str(n) if done in {0, n} and done else f"{done} of {n}" for done, n in pairs]


def _ratios(comparison: pd.DataFrame) -> list[str]:
    texts = []
    names = (*(f"throughput_ratio{part}" for part in ("", "_low", "_high", "_n")), "n_completed")
    for ratio, low, high, n, usual in zip(*(comparison[name] for name in names), strict=True):
        if pd.isna(ratio):
            texts.append(MISSING)
            continue
        places = 3 if ratio < 10 else 1
        interval = "" if pd.isna(low) else f" [{low:.{places}f}, {high:.{places}f}]"
        text = f"{ratio:.{places}f}{interval}"
        # The reference has no pairs of its own.
        texts.append(f"{text} (n={n:.0f})" if ratio != 1 and n != usual else text)
    return texts
