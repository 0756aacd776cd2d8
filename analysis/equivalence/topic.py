"""Equivalence of decompositions in the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.equivalence.decompositions import (
    differences_by_cell,
    loss_differences,
    members_of,
    reference_labels,
    seed_spread,
)
from batchscape.analysis.equivalence.figures import (
    divergence_chart,
    equivalence_chart,
)
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
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import decomposition_table, geometry_column, setting_columns
from batchscape.analysis.report.topic import Section
from batchscape.analysis.targets.tidy import at_common_target
from batchscape.record.tables import Tables
from batchscape.text import count_text, list_text

_LEVEL = 1 - 2 * ALPHA
_QUANTITIES = {
    "final_eval_loss": "eval loss",
    "final_loss": "training loss",
    "log_steps_to_target": "log steps",
}
"""Labels of the quantities in tables."""


def equivalence_section(
    cells: Cells, tables: Tables, reaches: pd.DataFrame | None = None
) -> Section | None:
    """Judge whether decompositions train alike; None where no trajectory has two of them."""
    if reaches is not None:
        members = members_of(cells, ("completed", "diverged"))
        family = members.groupby("reference")["cell"].transform("nunique") > 1
        reaches = at_common_target(reaches, members[family], ["reference"])
    pairs = paired_differences(cells, reaches)
    judged = judge_equivalence(pairs)
    gradients = gradient_error_table(gradient_errors(cells))
    if judged.empty and gradients.empty:
        return None
    answer: list[str] = []
    warnings: list[str] = []
    views: list[Table] = []
    charts: list[Chart | None] = []
    headlines: dict[str, Estimate] = {}
    if len(judged):
        has_evals = judged["quantity"].eq("final_eval_loss") & judged["n"].gt(0)
        quantity = "final_eval_loss" if has_evals.any() else "final_loss"
        verdicts = judged[judged["quantity"].eq(quantity)]
        margins = verdicts["margin"].dropna()
        answer += _verdicts(cells, verdicts)
        warnings += _warnings(cells, judged, verdicts)
        headlines |= _loss_headline(verdicts)
        rows = np.flatnonzero(judged["quantity"].isin([quantity, "log_steps_to_target"])).tolist()
        views.append(_equivalence_table(_with_cells(judged, cells), cells, rows))
        by_step, spread = loss_differences(cells, tables.steps), seed_spread(cells, tables.steps)
        margin = float(margins.min()) if len(margins) else MARGINS["measure.equivalence_margin"]
        charts.append(equivalence_chart(cells, verdicts, pairs[pairs["quantity"].eq(quantity)]))
        charts.append(divergence_chart(cells, by_step, spread, margin))
        differences = differences_by_cell(cells, by_step, spread)
        if len(differences):
            views.append(decomposition_table(differences, cells))
    if len(gradients):
        answer += _gradient_sentences(gradients)
        headlines |= _gradient_headlines(gradients)
        views.insert(1, _gradient_table(_with_cells(gradients, cells), cells))
    return Section(
        title="Do decompositions train alike?",
        answer=answer,
        tables=views,
        pictures=[chart for chart in charts if chart is not None],
        warnings=warnings,
        headlines=headlines,
    )


def _verdicts(cells: Cells, verdicts: pd.DataFrame) -> Iterator[str]:
    families = family_verdicts(verdicts)
    counts = verdicts["verdict"].value_counts()
    is_eval = verdicts["quantity"].iloc[0] == "final_eval_loss"
    margins = list_text(dict.fromkeys(f"{m:g}" for m in verdicts["margin"].dropna()))
    outcome = ", ".join(
        f"{counts[verdict]} {verdict}"
        for verdict in ("equivalent", "different", "not identified")
        if verdict in counts
    )
    if set(counts.index) == {"equivalent"}:
        outcome = "all equivalent"
    n = count_text(len(verdicts), "decomposition")
    yield (
        f"Of {n}, compared with the first of their global batch and "
        f"settings by the final {'held-out' if is_eval else 'training'} loss and a margin of "
        f"{margins or 'several'} nats: {outcome}."
    )
    labels = cells.labels()
    if len(families) > 1:
        names = [
            f"{labels[row['reference']]}: {row['verdict']} "
            f"({row['n_equivalent']} of {row['n_decompositions']})"
            for row in families.to_dict("records")
        ]
        yield f"By reference: {'; '.join(names[:12])}{'; ...' if len(names) > 12 else ''}."
    bound, sd = verdicts["smallest_margin"].max(), verdicts["seed_sd"].max()
    if not math.isnan(bound):
        seeds = "" if math.isnan(sd) else f", seeds differ by {significant(sd, 2)} (sd)"
        yield f"The {_LEVEL:.0%} intervals reach {significant(bound, 2)} nats at most{seeds}."
    if cells.of_programs().reindex(verdicts["cell"]).any():
        yield (
            "The script decides the order of samples and how it sums its loss. Whether cuts of a "
            "program train alike is measured here for these cuts, and assumed of no other."
        )


def _gradient_sentences(table: pd.DataFrame) -> Iterator[str]:
    for name, against in (
        ("relative_error", "from the float64 gradient by"),
        ("relative_difference", "from that of the first decomposition by"),
    ):
        parts = []
        groups = table.dropna(subset=[name]).groupby("precision", sort=False)[name]
        for precision, errors in groups:
            low, high = significant(errors.min(), 2), significant(errors.max(), 2)
            parts.append(f"{low if low == high else f'{low} to {high}'} in {precision}")
        if parts:
            yield f"The first gradient differs, relative to its norm, {against} {', '.join(parts)}."


def _warnings(cells: Cells, judged: pd.DataFrame, verdicts: pd.DataFrame) -> Iterator[str]:
    conflicts = judged["reason"].fillna("").str.contains("several margins")
    if conflicts.any():
        reason = judged.loc[conflicts, "reason"].iloc[0]
        yield f"No verdict for {conflicts.sum()} comparisons: {reason}."
    unidentified = verdicts[verdicts["verdict"].eq("not identified") & ~conflicts[verdicts.index]]
    if len(unidentified):
        why = "; ".join(list(dict.fromkeys(unidentified["reason"].dropna()))[:3])
        yield f"Not identified for {len(unidentified)} of {len(verdicts)}: {why}."
    of_programs = verdicts[verdicts["cell"].map(cells.of_programs()).astype(bool)]
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
    half = t_reach(row["sd_difference"], row["n"] - 1) / math.sqrt(row["n"])
    estimate = Estimate(
        value=row["mean_difference"],
        low=row["mean_difference"] - half,
        high=row["mean_difference"] + half,
        n=row["n"],
        unit="nats",
        method=f"paired t, {LEVEL:.0%} interval over {row['n']} seeds",
        definition=f"paired difference of {row['quantity']} of the decomposition whose "
        f"interval reaches furthest from 0 (its verdict rests on the {_LEVEL:.0%} one)",
    )
    return {"decomposition_loss_difference": estimate}


def _gradient_headlines(table: pd.DataFrame) -> dict[str, Estimate]:
    headlines = {}
    for precision, rows in table.dropna(subset=["relative_error"]).groupby("precision"):
        row = rows.nlargest(1, "relative_error").to_dict("records")[0]
        headlines[f"gradient_error_{precision}"] = Estimate(
            value=row["relative_error"],
            low=row["relative_error_low"],
            high=row["relative_error_high"],
            n=row["relative_error_n"],
            unit="",
            method=f"mean and t-interval over {row['relative_error_n']} seeds, sketches of "
            f"{row['buckets']} buckets (relative sd {sketch_spread(row['buckets']):.1%})",
            definition="|g - g64| / |g64| of the first gradient, of the decomposition in "
            "which it is largest",
        )
    return headlines


def _with_cells(table: pd.DataFrame, cells: Cells) -> pd.DataFrame:
    """Put geometry, settings and precision before rows that have a cell; label the reference."""
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


def _equivalence_table(table: pd.DataFrame, cells: Cells, rows: Sequence[int]) -> Table:
    """Show the verdicts of `judge_equivalence`, `_with_cells`, at some positions."""
    return Table(
        "equivalence",
        "Equivalence of final losses, by two one-sided tests",
        table,
        [
            geometry_column(table),
            Column("reference", "against", is_left=True),
            *setting_columns(table, [name for name in cells.contexts if name in table]),
            Column("quantity", words=_QUANTITIES, is_left=True),
            Column("n", "seeds"),
            Column("mean_difference", "mean Δ", format=2, low="low", high="high"),
            Column("margin", format="g"),
            Column("verdict"),
            Column("smallest_margin", "equivalent from margin", format=2),
            Column("seed_sd", "sd between seeds", format=2),
        ],
        rows,
        footnotes=[table["reason"]],
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


def _gradient_table(table: pd.DataFrame, cells: Cells) -> Table:
    """Show the errors of `gradient_error_table`, `_with_cells`."""
    spread = sketch_spread(int(table["buckets"].max()))
    settings = [name for name in cells.contexts if name in table]
    settings += [] if "precision" in settings else ["precision"]
    columns = [geometry_column(table), *setting_columns(table, settings)]
    for label, name, word in (
        ("error against float64", "relative_error", "error"),
        ("from first decomposition", "relative_difference", "difference"),
    ):
        if table[f"{name}_n"].gt(0).any():
            columns.append(Column(name, label, "", 2, f"{name}_low", f"{name}_high"))
            columns.append(Column(f"{name}_n", f"seeds of {word}"))
    return Table(
        "gradient_errors",
        "Relative error of the first gradient",
        table,
        columns,
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
