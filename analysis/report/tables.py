"""What the comparison and decomposition tables show, and their files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells, setting_label
from batchscape.analysis.comparison import CONFIDENCE
from batchscape.analysis.numbers import (
    MISSING,
    TIMES,
    Scale,
    memory_scale,
    significant,
    time_scale,
    with_spread,
)
from batchscape.analysis.report.grids import Grid, to_latex, to_markdown
from batchscape.record.summary import SUMMARY

__all__ = [
    "GEOMETRY_HEADER",
    "comparison_grid",
    "decomposition_grid",
    "geometry_texts",
    "setting_headers",
    "write_table",
]

GEOMETRY_HEADER = f"devices {TIMES} micro {TIMES} accumulation = global"
"""Header of a column of geometries."""


def comparison_grid(comparison: pd.DataFrame, cells: Cells) -> Grid:
    """Choose what of the comparison goes on a page.

    Parameters
    ----------
    comparison : DataFrame
        As `compare` returns it.
    cells : Cells
        What it was computed from.

    Returns
    -------
    Grid
    """
    columns: list[Iterable[str]] = [geometry_texts(comparison)]
    columns += [comparison[name].fillna(MISSING) for name in cells.shown]
    columns += [comparison["status"], _counts(comparison)]
    headers = [GEOMETRY_HEADER, *setting_headers(cells.shown), "status", "n"]
    definitions = [
        "n: completed runs, as '2 of 3' where other runs of the cell did not complete. Figures are "
        "means ± standard deviations over the completed runs only: over runs for memory and "
        "times, over seeds for losses."
    ]
    for name, label, scale in _figures(comparison):
        if name == "throughput_ratio":
            columns.append(_ratios(comparison))
            headers.append("throughput ratio")
            definitions.append(_ratio_definition(comparison))
            continue
        columns.append(_spread_texts(comparison, name, scale))
        headers.append(f"{label} ({scale.unit})" if scale.unit else label)
        definitions.append(f"{label}: {SUMMARY[name]}.")
        if name == "mfu_pct":
            definitions.append(_peaks(cells))
    marks, footnotes = _footnotes(comparison)
    return Grid(
        headers=headers,
        rows=[list(row) for row in zip(*columns, strict=True)],
        short_first="geometry",
        n_left=2 + len(cells.shown),
        marks=marks,
        footnotes=footnotes,
        notes=definitions,
    )


def decomposition_grid(table: pd.DataFrame, cells: Cells) -> Grid:
    """Choose what of the decomposition table goes on a page.

    Parameters
    ----------
    table : DataFrame
        As `compare_decompositions` returns it.
    cells : Cells
        What it was computed from.

    Returns
    -------
    Grid
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
    columns: list[Iterable[str]] = [geometry_texts(table), table["reference"]]
    columns += [table[name].fillna(MISSING) for name in settings]
    columns += [table[name].astype(str) for name in ("n_trajectories", "n_optimizer_steps")]
    columns += [table[name].map(lambda value: significant(value, 2)) for name in figures]
    marks, footnotes = _lettered([[note] for note in table["note"]])
    return Grid(
        headers=[
            GEOMETRY_HEADER,
            "against",
            *setting_headers(settings),
            "seeds",
            "paired steps",
            *figures.values(),
        ],
        rows=[list(row) for row in zip(*columns, strict=True)],
        short_first="geometry",
        n_left=2 + len(settings),
        marks=marks,
        footnotes=footnotes,
        notes=[
            "Δ loss: training loss minus that of the first decomposition of the same trajectory, "
            "paired by seed and optimizer step, over all seeds and optimizer steps; 0 means equal "
            f"to the last bit. Arithmetic: {', '.join(precisions)}.",
            "sd between seeds: spread of the loss at the same optimizer step over seeds, root "
            "mean square over optimizer steps.",
        ],
    )


def geometry_texts(table: pd.DataFrame) -> pd.Series[str]:
    """Write geometries as 1x32x1=32, `?` where a part was never determined."""
    parts = [table[name].astype("string").fillna("?") for name in GEOMETRY]
    return parts[0] + TIMES + parts[1] + TIMES + parts[2] + "=" + parts[3]


def write_table(folder: Path, name: str, table: pd.DataFrame, grid: Grid) -> list[Path]:
    """Write a table as CSV (all columns), Markdown and LaTeX (what the grid shows).

    Parameters
    ----------
    folder : Path
    name : str
        File name without its ending.
    table : DataFrame
    grid : Grid

    Returns
    -------
    list of Path
        The files written.
    """
    files = [folder / f"{name}.{ending}" for ending in ("csv", "md", "tex")]
    table.to_csv(files[0], index=False)
    files[1].write_text(to_markdown(grid), encoding="utf-8")
    files[2].write_text(to_latex(grid), encoding="utf-8")
    return files


def _figures(comparison: pd.DataFrame) -> list[tuple[str, str, Scale]]:
    """Name, label and unit of the figures that this comparison shows."""
    plain = Scale("", 1.0)
    memory = memory_scale(comparison["peak_allocated_gib_mean"])
    figures = [("peak_allocated_gib", "peak memory", memory)]
    figures += [("step_time_s", "step time", time_scale(comparison["step_time_s_mean"]))]
    # Samples of a classification task are not tokens, though each has one target.
    classified = comparison["final_eval_accuracy_n"].gt(0) | (
        comparison["samples_per_s_n"].gt(0) & comparison["tokens_per_s_n"].eq(0)
    )
    if not classified.any() or (~classified & comparison["n_completed"].gt(0)).any():
        figures.append(("tokens_per_s", "tokens/s", plain))
    if classified.any():
        figures.append(("samples_per_s", "samples/s", plain))
    # The first cell of its settings has ratio 1: alone, it says nothing.
    if comparison["throughput_ratio"].dropna().ne(1).any():
        figures.append(("throughput_ratio", "ratio", plain))
    for name, label in (("mfu_pct", "MFU"), ("energy_j_per_token", "energy a token")):
        if comparison[f"{name}_n"].gt(0).any():
            figures.append((name, label, Scale("%" if name == "mfu_pct" else "J", 1.0)))
    figures += [("final_loss", "final loss", plain), ("final_eval_loss", "eval loss", plain)]
    if comparison["final_eval_accuracy_n"].gt(0).any():
        figures.append(("final_eval_accuracy", "eval accuracy", plain))
    return figures


def _peaks(cells: Cells) -> str:
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
        "multiply-add, causal attention in full, recomputation not counted. Peak of a device in "
        f"10^12 FLOP/s: {peaks}."
    )


def _spread_texts(comparison: pd.DataFrame, name: str, scale: Scale) -> list[str]:
    texts = []
    usual = comparison["n_completed"]
    rows = zip(*(comparison[f"{name}_{part}"] for part in ("mean", "sd", "n")), usual, strict=True)
    for mean, sd, n, expected in rows:
        text = with_spread(mean * scale.factor, sd * scale.factor)
        texts.append(f"{text} (n={n})" if 0 < n != expected else text)
    return texts


def _counts(comparison: pd.DataFrame) -> list[str]:
    pairs = zip(comparison["n_completed"], comparison["n"], strict=True)
    return [str(n) if done in {0, n} and done else f"{done} of {n}" for done, n in pairs]


def _ratios(comparison: pd.DataFrame) -> list[str]:
    texts = []
    names = ("throughput_ratio", "throughput_ratio_low", "throughput_ratio_high")
    for ratio, low, high in zip(*(comparison[name] for name in names), strict=True):
        if pd.isna(ratio):
            texts.append(MISSING)
            continue
        places = 3 if ratio < 10 else 1
        interval = "" if pd.isna(low) else f" [{low:.{places}f}, {high:.{places}f}]"
        texts.append(f"{ratio:.{places}f}{interval}")
    return texts


def _ratio_definition(comparison: pd.DataFrame) -> str:
    references = comparison["throughput_ratio_reference"].dropna().unique()
    first = f", {references[0]}" if len(references) == 1 else " of the same settings"
    return (
        f"throughput ratio: throughput over that of the first cell{first}, geometric mean over "
        f"pairs of runs with the same seed, with its {CONFIDENCE:.0%} t-interval."
    )


def setting_headers(names: Sequence[str]) -> list[str]:
    """Shorten the keys of settings, but for those that would then be the same."""
    labels = [setting_label(name) for name in names]
    repeated = Counter(labels)
    return [
        name if repeated[label] > 1 else label for name, label in zip(names, labels, strict=True)
    ]


def _footnotes(comparison: pd.DataFrame) -> tuple[list[list[str]], dict[str, str]]:
    timed = comparison["step_time_s_n"].gt(0)
    texts = []
    names = ("reason", "timing_note", "not_invariant")
    for reason, note, label, some in zip(*(comparison[n] for n in names), timed, strict=True):
        what = "some times left out" if some else "no times"
        texts.append(
            [
                reason,
                None if pd.isna(note) else f"{what}: {note}",
                None if pd.isna(label) else f"not decomposition-invariant: {label}",
            ]
        )
    return _lettered(texts)


def _lettered(texts: Sequence[Sequence[object]]) -> tuple[list[list[str]], dict[str, str]]:
    """Give each distinct text a letter; missing ones have none."""
    letters: dict[str, str] = {}
    marks = []
    for row in texts:
        found = [text for text in row if isinstance(text, str)]
        for text in found:
            letters.setdefault(text, _letter(len(letters)))
        marks.append(sorted((letters[text] for text in found), key=lambda mark: (len(mark), mark)))
    return marks, {letter: text for text, letter in letters.items()}


def _letter(index: int) -> str:
    """Return a, b, ... z, aa, ab, ..."""
    quotient, remainder = divmod(index, 26)
    return (_letter(quotient - 1) if quotient else "") + chr(ord("a") + remainder)
