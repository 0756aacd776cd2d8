"""What the report says of decompositions: equivalent or not, and by how much they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.equivalence.decompositions import (
    compared,
    loss_differences,
    members_of,
    seed_spread,
)
from batchscape.analysis.equivalence.figures import (
    MOST_ROWS,
    decompositions_chart,
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
from batchscape.analysis.equivalence.tables import (
    equivalence_table,
    gradient_table,
    with_cells,
)
from batchscape.analysis.equivalence.tost import ALPHA, POWER
from batchscape.analysis.estimates import LEVEL, Estimate, t_reach
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.settings import cell_names
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.table import Table
from batchscape.analysis.report.tables import decomposition_table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.targets.tidy import at_common_target
from batchscape.record.tables import Tables
from batchscape.text import list_text

_LEVEL = 1 - 2 * ALPHA


def equivalence_section(
    cells: Cells, tables: Tables, reaches: pd.DataFrame | None = None
) -> Section | None:
    """Judge whether decompositions train alike; None where no trajectory has two of them."""
    if reaches is not None:
        members = members_of(cells, ("completed", "diverged"))
        family = members.groupby("reference")["cell"].transform("nunique") > 1
        reaches = at_common_target(reaches, members[family], ["reference"])
    pairs = paired_differences(cells, reaches)
    judged = judge_equivalence(pairs, generator=np.random.default_rng(0))
    errors = gradient_errors(cells)
    if judged.empty and errors.empty:
        return None
    views, pictures = [], []
    if len(judged):
        by_step, spread = loss_differences(cells, tables.steps), seed_spread(cells, tables.steps)
        table = compared(cells, by_step, spread)
        views += _loss_views(cells, judged, table)
        pictures = _pictures(cells, judged, pairs, (by_step, spread), table)
    gradients = gradient_error_table(errors)
    if len(gradients):
        views.insert(1, gradient_table(with_cells(gradients, cells), cells))
    return Section(
        title="Do decompositions train alike?",
        answer=[*_verdicts(cells, judged), *_of_programs(cells, judged), *_gradients(gradients)],
        tables=views,
        pictures=pictures,
        warnings=[*_warnings(judged), *_not_shown(cells, judged)],
        headlines=_headlines(judged, gradients),
    )


def _loss_views(cells: Cells, judged: pd.DataFrame, table: pd.DataFrame) -> list[Table]:
    is_shown = judged["quantity"].isin([_primary(judged), "log_steps_to_target"])
    rows = np.flatnonzero(is_shown).tolist()
    views = [equivalence_table(with_cells(judged, cells), cells, rows)]
    return [*views, decomposition_table(table, cells)] if len(table) else views


def _pictures(
    cells: Cells,
    judged: pd.DataFrame,
    pairs: pd.DataFrame,
    over_steps: tuple[pd.DataFrame, pd.DataFrame],
    table: pd.DataFrame,
) -> list[Chart]:
    quantity = _primary(judged)
    what = "held-out" if quantity == "final_eval_loss" else "training"
    caption = (
        f"Paired differences of the final {what} loss between a decomposition and the first one of "
        f"its trajectory: a dot a seed, and a line that ends where the {_LEVEL:.0%} interval does; "
        "equivalent where it ends before the margin. Dots on the left edge are differences of "
        "exactly 0."
    )
    of_quantity = judged["quantity"] == quantity
    if of_quantity.sum() > MOST_ROWS:
        caption += f" The {MOST_ROWS} with the largest intervals are drawn."
    quantity_pairs = pairs[pairs["quantity"] == quantity]
    names = geometry_label(cells.table) + cell_names(cells).map(lambda n: f", {n}" if n else "")
    divergence = (
        "Root mean square, over seeds, of the difference of the training loss between a "
        "decomposition and the first one of its trajectory, at the same optimizer step; "
        "differences of exactly 0 are left out."
    )
    charts = (
        equivalence_chart(cells, judged[of_quantity], quantity_pairs, caption),
        divergence_chart(cells, *over_steps, _margin_of(judged), divergence),
        decompositions_chart(table, names, cells) if len(table) else None,
    )
    return [chart for chart in charts if chart is not None]


def _verdicts(cells: Cells, judged: pd.DataFrame) -> Iterator[str]:
    if judged.empty:
        return
    quantity = _primary(judged)
    verdicts = judged[judged["quantity"] == quantity]
    families = family_verdicts(verdicts)
    counts = verdicts["verdict"].value_counts()
    what = "held-out loss" if quantity == "final_eval_loss" else "training loss"
    margins = list_text(dict.fromkeys(f"{m:g}" for m in verdicts["margin"].dropna()))
    outcome = ", ".join(
        f"{counts[verdict]} {verdict}"
        for verdict in ("equivalent", "different", "not identified")
        if verdict in counts
    )
    if set(counts.index) == {"equivalent"}:
        outcome = "all equivalent"
    yield (
        f"Of {len(verdicts)} decompositions, compared with the first of their global batch and "
        f"settings by the final {what} and a margin of {margins or 'several'} nats: {outcome}."
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
        text = (
            f"The {_LEVEL:.0%} intervals reach {significant(bound, 2)} nats at most"
            f"{'' if math.isnan(sd) else f', seeds differ by {significant(sd, 2)} (sd)'}"
        )
        least = verdicts["detectable_margin"].max()
        yield (
            f"{text}. Pairs as many and as variable as these would show equivalence with "
            f"{POWER:.0%} power from a margin of {significant(least, 2)} nats on."
        )


def _of_programs(cells: Cells, judged: pd.DataFrame) -> Iterator[str]:
    if len(judged) and cells.of_programs().reindex(judged["cell"]).any():
        yield (
            "The order of samples is the script's, and so is how it sums its loss: that cuts of a "
            "program train alike is measured here, for these cuts, and assumed of no other."
        )


def _not_shown(cells: Cells, judged: pd.DataFrame) -> Iterator[str]:
    """Say what else rests on the equality of a program's cuts where it was not shown."""
    if judged.empty:
        return
    verdicts = judged[judged["cell"].map(cells.of_programs()).astype(bool)]
    verdicts = verdicts[verdicts["quantity"] == _primary(judged)]
    unproven = verdicts[verdicts["verdict"].ne("equivalent")]
    if len(unproven):
        yield (
            f"{len(unproven)} of {len(verdicts)} cuts of a program were not shown to train alike. "
            "The trade-off and the best learning rate take one cut for each seed, and would differ "
            "with another; times to a target are each cut's own."
        )


def _gradients(table: pd.DataFrame) -> Iterator[str]:
    for name, against in (
        ("relative_error", "from the float64 gradient by"),
        ("relative_difference", "from that of the first decomposition by"),
    ):
        rows_with_error = table.dropna(subset=[name]) if len(table) else table
        if rows_with_error.empty:
            continue
        parts = []
        for precision, rows in rows_with_error.groupby("precision", sort=False)[name]:
            low, high = significant(rows.min(), 2), significant(rows.max(), 2)
            parts.append(f"{low if low == high else f'{low} to {high}'} in {precision}")
        yield f"The first gradient differs, relative to its norm, {against} {', '.join(parts)}."


def _warnings(judged: pd.DataFrame) -> Iterator[str]:
    if judged.empty:
        return
    conflicts = judged["reason"].fillna("").str.contains("several margins")
    if conflicts.any():
        reason = judged.loc[conflicts, "reason"].iloc[0]
        yield f"No verdict for {conflicts.sum()} comparisons: {reason}."
    verdicts = judged[judged["quantity"] == _primary(judged)]
    unknown = verdicts[
        verdicts["verdict"].eq("not identified") & ~conflicts.reindex(verdicts.index)
    ]
    if len(unknown):
        reasons = dict.fromkeys(unknown["reason"].dropna())
        why = "; ".join(list(reasons)[:3])
        yield f"Not identified for {len(unknown)} of {len(verdicts)}: {why}."


def _headlines(judged: pd.DataFrame, gradients: pd.DataFrame) -> dict[str, Estimate]:
    headlines = {}
    if len(judged):
        verdicts = judged[
            judged["quantity"].eq(_primary(judged)) & judged["smallest_margin"].notna()
        ]
        for row in verdicts.nlargest(1, "smallest_margin").to_dict("records"):
            # A headline has the level of all others; the verdict rests on the narrower interval.
            half = t_reach(row["sd_difference"], row["n"] - 1) / math.sqrt(row["n"])
            headlines["decomposition_loss_difference"] = Estimate(
                value=row["mean_difference"],
                low=row["mean_difference"] - half,
                high=row["mean_difference"] + half,
                n=row["n"],
                unit="nats",
                method=f"paired t, {LEVEL:.0%} interval over {row['n']} seeds",
                definition=f"paired difference of {row['quantity']} of the decomposition whose "
                f"interval reaches furthest from 0 (its verdict rests on the {_LEVEL:.0%} one)",
            )
    rows_with_error = gradients.dropna(subset=["relative_error"]) if len(gradients) else gradients
    for precision, rows in rows_with_error.groupby("precision") if len(rows_with_error) else ():
        for row in rows.nlargest(1, "relative_error").to_dict("records"):
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


def _primary(judged: pd.DataFrame) -> str:
    """Return the quantity that decides: the held-out loss, or without any the training loss."""
    has_evals = judged["quantity"].eq("final_eval_loss") & judged["n"].gt(0)
    return "final_eval_loss" if has_evals.any() else "final_loss"


def _margin_of(judged: pd.DataFrame) -> float:
    stated = judged.loc[judged["quantity"] == _primary(judged), "margin"].dropna()
    return float(stated.min()) if len(stated) else MARGINS["measure.equivalence_margin"]
