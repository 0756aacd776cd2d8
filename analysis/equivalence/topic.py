"""Equivalence of decompositions in the report."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.equivalence.decompositions import (
    differences_by_cell,
    members_of,
    reference_labels,
    step_differences,
    with_precision,
)
from batchscape.analysis.equivalence.figures import divergence_chart, equivalence_chart
from batchscape.analysis.equivalence.gradients import (
    gradient_error_table,
    gradient_errors,
    sketch_spread,
)
from batchscape.analysis.equivalence.paired import (
    MARGINS,
    family_verdicts,
    judge_equivalence,
    paired_differences,
)
from batchscape.analysis.equivalence.tost import ALPHA
from batchscape.analysis.estimates import LEVEL, Estimate, t_reach
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import decomposition_table, geometry_column, setting_columns
from batchscape.analysis.report.topic import Section, join_sections
from batchscape.record.tables import Tables
from batchscape.text import count_text, list_text

_TITLE = "Do decompositions train alike?"
_LEVEL = 1 - 2 * ALPHA
_QUANTITIES = {
    "final_eval_loss": "eval loss",
    "final_loss": "training loss",
    "log_steps_to_target": "log steps",
}
"""Labels of the quantities in tables."""
_GRADIENTS = (
    ("relative_error", "error against float64", "error", "the float64 gradient"),
    (
        "relative_difference",
        "from first decomposition",
        "difference",
        "that of the first decomposition",
    ),
)
"""Columns of errors of gradients: header, word for the seeds, and what they are measured from."""
_MOST_FAMILIES = 12
"""References named in a sentence."""


def equivalence_section(
    cells: Cells, tables: Tables, reaches: pd.DataFrame | None = None
) -> Section | None:
    """Judge whether decompositions train alike; None where no trajectory has two of them."""
    parts = [_losses(cells, tables, reaches), _gradients(cells)]
    sections = [part for part in parts if part is not None]
    return join_sections(_TITLE, sections) if sections else None


def _losses(cells: Cells, tables: Tables, reaches: pd.DataFrame | None) -> Section | None:
    """Judge final losses and steps to a target; None without a pair."""
    pairs = paired_differences(cells, reaches)
    judged = judge_equivalence(pairs)
    if judged.empty:
        return None
    has_evals = judged["quantity"].eq("final_eval_loss") & judged["n"].gt(0)
    quantity = "final_eval_loss" if has_evals.any() else "final_loss"
    verdicts = judged[judged["quantity"].eq(quantity)]
    by_step, spread = step_differences(members_of(cells), tables.steps)
    differences = differences_by_cell(cells, by_step, spread)
    margin = verdicts["margin"].min()
    margin = MARGINS["measure.equivalence_margin"] if math.isnan(margin) else float(margin)
    charts = [
        equivalence_chart(cells, verdicts, pairs[pairs["quantity"].eq(quantity)]),
        divergence_chart(cells, by_step, spread, margin),
    ]
    table = _equivalence_table(judged, cells, quantity)
    return Section(
        _TITLE,
        list(_verdicts(cells, verdicts)),
        [table, decomposition_table(differences, cells)] if len(differences) else [table],
        [chart for chart in charts if chart is not None],
        list(_warnings(cells, judged, verdicts)),
        _loss_headline(verdicts),
    )


def _verdicts(cells: Cells, verdicts: pd.DataFrame) -> Iterator[str]:
    kind = "held-out" if verdicts["quantity"].iloc[0] == "final_eval_loss" else "training"
    margins = list_text(dict.fromkeys(f"{m:g}" for m in verdicts["margin"].dropna()))
    counts = verdicts["verdict"].value_counts()
    words = ("equivalent", "different", "not identified")
    outcome = ", ".join(f"{counts[verdict]} {verdict}" for verdict in words if verdict in counts)
    yield (
        f"Of {count_text(len(verdicts), 'decomposition')}, compared with the first of their global "
        f"batch and settings by the final {kind} loss and a margin of {margins or 'several'} nats: "
        f"{'all equivalent' if set(counts.index) == {'equivalent'} else outcome}."
    )
    families = family_verdicts(verdicts)
    if len(families) > 1:
        labels = cells.labels()
        names = [
            f"{labels[row['reference']]}: {row['verdict']} "
            f"({row['n_equivalent']} of {row['n_decompositions']})"
            for row in families.head(_MOST_FAMILIES).to_dict("records")
        ]
        more = "; ..." if len(families) > _MOST_FAMILIES else ""
        yield f"By reference: {'; '.join(names)}{more}."
    bound, sd = verdicts["smallest_margin"].max(), verdicts["seed_sd"].max()
    if not math.isnan(bound):
        seeds = "" if math.isnan(sd) else f", seeds differ by {significant(sd, 2)} (sd)"
        yield f"The {_LEVEL:.0%} intervals reach {significant(bound, 2)} nats at most{seeds}."
    if cells.of_programs()[verdicts["cell"]].any():
        yield (
            "The script decides the order of samples and how it sums its loss. Whether cuts of a "
            "program train alike is measured here for these cuts, and assumed of no other."
        )


def _warnings(cells: Cells, judged: pd.DataFrame, verdicts: pd.DataFrame) -> Iterator[str]:
    conflicts = judged["reason"].fillna("").str.contains("several margins")
    if conflicts.any():
        reason = judged.loc[conflicts, "reason"].iloc[0]
        yield f"No verdict for {conflicts.sum()} comparisons: {reason}."
    unidentified = verdicts[verdicts["verdict"].eq("not identified") & ~conflicts[verdicts.index]]
    if len(unidentified):
        why = "; ".join(unidentified["reason"].unique()[:3])
        yield f"Not identified for {len(unidentified)} of {len(verdicts)}: {why}."
    of_programs = verdicts[cells.of_programs()[verdicts["cell"]].to_numpy(dtype=bool)]
    unproven = of_programs["verdict"].ne("equivalent").sum()
    if unproven:
        yield (
            f"{unproven} of {len(of_programs)} cuts of a program were not shown to train alike. "
            "The trade-off and the best learning rate take one cut for each seed, and would differ "
            "with another; times to a target are each cut's own."
        )


def _loss_headline(verdicts: pd.DataFrame) -> dict[str, Estimate]:
    identified = verdicts.dropna(subset=["smallest_margin"])
    if identified.empty:
        return {}
    row = identified.nlargest(1, "smallest_margin").to_dict("records")[0]
    # A headline has the level of all others; the verdict rests on the narrower interval.
    mean, half = row["mean_difference"], t_reach(row["sd_difference"], row["n"] - 1)
    half /= math.sqrt(row["n"])
    definition = (
        f"paired difference of {row['quantity']} of the decomposition whose interval reaches "
        f"furthest from 0 (its verdict rests on the {_LEVEL:.0%} one)"
    )
    method = f"paired t, {LEVEL:.0%} interval over {row['n']} seeds"
    estimate = Estimate(mean, mean - half, mean + half, row["n"], "nats", method, definition)
    return {"decomposition_loss_difference": estimate}


def _with_cells(table: pd.DataFrame, cells: Cells) -> pd.DataFrame:
    """Put geometry, settings and precision before rows that have a cell."""
    head = with_precision(cells)
    rows = table.drop(columns=table.columns.intersection(head.columns))
    return head.merge(rows, left_index=True, right_on="cell").reset_index(drop=True)


def _equivalence_table(judged: pd.DataFrame, cells: Cells, quantity: str) -> Table:
    labels = judged["reference"].map(reference_labels(cells))
    table = _with_cells(judged.assign(reference=labels), cells)
    is_shown = table["quantity"].isin([quantity, "log_steps_to_target"])
    return Table(
        "equivalence",
        "Equivalence of final losses, by two one-sided tests",
        table,
        [
            geometry_column(table),
            Column("reference", "against", is_left=True),
            *setting_columns(table, cells.contexts),
            Column("quantity", words=_QUANTITIES, is_left=True),
            Column("n", "seeds"),
            Column("mean_difference", "mean Δ", format=2, low="low", high="high"),
            Column("margin", format="g"),
            Column("verdict"),
            Column("smallest_margin", "equivalent from margin", format=2),
            Column("seed_sd", "sd between seeds", format=2),
        ],
        np.flatnonzero(is_shown).tolist(),
        footnotes=[table["reason"]],
        hidden=["cell"],
        notes=[
            "Δ: final held-out loss, or logarithm of the optimizer steps to the lowest target that "
            "all cuts of a global batch reached, minus that of the reference decomposition, "
            f"paired by seed; with its {_LEVEL:.0%} t-interval over seeds.",
            "verdict: two one-sided t-tests at "
            f"{ALPHA:g}. Equivalent: the interval lies within the margin. Different: wholly beyond "
            "it. Not identified: neither, which says nothing of equality. equivalent from margin: "
            "the smallest margin that these runs would have met.",
            "That all decompositions are equivalent needs no correction for their number "
            "(intersection-union test); that one of them is different is corrected by "
            "Bonferroni's method.",
        ],
    )


def _gradients(cells: Cells) -> Section | None:
    """Say how far first gradients are from float64 and from each other; None where none is."""
    errors = gradient_errors(cells)
    if errors.empty:
        return None
    table = gradient_error_table(errors)
    frame = _with_cells(table.reset_index(), cells)
    spread = sketch_spread(int(table["buckets"].max()))
    names = list(dict.fromkeys([*cells.contexts, "precision"]))
    columns = [geometry_column(frame), *setting_columns(frame, names)]
    answer = []
    for name, header, word, against in _GRADIENTS:
        measured = table.dropna(subset=[name]).groupby("precision", sort=False)[name]
        if not len(measured):
            continue
        columns.append(Column(name, header, "", 2, f"{name}_low", f"{name}_high"))
        columns.append(Column(f"{name}_n", f"seeds of {word}"))
        ends = measured.agg(["min", "max"]).map(lambda end: significant(end, 2))
        parts = [
            f"{' to '.join(dict.fromkeys((low, high)))} in {precision}"
            for precision, low, high in ends.itertuples()
        ]
        by = ", ".join(parts)
        answer.append(f"The first gradient differs, relative to its norm, from {against} by {by}.")
    by_precision = table.dropna(subset=["relative_error"]).groupby("precision")
    largest = by_precision["relative_error"].idxmax()
    return Section(
        _TITLE,
        answer,
        [
            Table(
                "gradient_errors",
                "Relative error of the first gradient",
                frame,
                columns,
                hidden=["cell"],
                notes=[
                    "error against float64: distance of the gradient of the first optimizer step, "
                    "after the exchange and before clipping, from that of the float64 run with the "
                    "same seeds and settings, over the norm of the latter. from first "
                    "decomposition: the same against the first decomposition of the same "
                    "precision. Means over seeds with their 95 % t-interval.",
                    "Distances are estimated from sketches, each with a relative standard "
                    f"deviation of {spread:.1%}; a difference of 0 is exact.",
                ],
            )
        ],
        headlines={
            f"gradient_error_{row['precision']}": Estimate(
                row["relative_error"],
                row["relative_error_low"],
                row["relative_error_high"],
                row["relative_error_n"],
                "",
                f"mean and t-interval over {row['relative_error_n']} seeds, sketches of "
                f"{row['buckets']} buckets (relative sd {spread:.1%})",
                "|g - g64| / |g64| of the first gradient, of the decomposition in which it is "
                "largest",
            )
            for row in table.loc[largest].to_dict("records")
        },
    )
