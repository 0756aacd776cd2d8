"""The report's section on learning rates: the optimum of each global batch, and the exponent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import FEWEST, LEVEL, Estimate
from batchscape.analysis.labels import group_name
from batchscape.analysis.learning_rate.aim import STEPS, find_optima, is_varied
from batchscape.analysis.learning_rate.choice import tuning_warning
from batchscape.analysis.learning_rate.exponent import (
    exponent_of,
    is_bounded,
    left_out_reason,
    rules_text,
)
from batchscape.analysis.learning_rate.figures import learning_rate_charts
from batchscape.analysis.learning_rate.optimum import optimum_estimate
from batchscape.analysis.learning_rate.table import costs_by_rate, with_runs
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.errors import AnalysisError
from batchscape.text import list_text

_TITLE = "Learning rate"


def learning_rate_section(
    reaches: pd.DataFrame,
    finals: pd.DataFrame | None = None,
    groups: Mapping[int, str] | None = None,
    batches: Sequence[float] = (),
    optima: pd.DataFrame | None = None,
    *,
    quantity: str = "held-out loss",
) -> Section | None:
    """Say which learning rate each global batch wants; None where none was varied.

    `quantity` is what the losses are, in words.
    """
    groups = groups or {}
    try:
        optimum = find_optima(reaches, finals, optima)
    except AnalysisError as error:
        if not is_varied(reaches):
            return None
        return Section(_TITLE, answer=["Not identified."], warnings=[str(error)])
    if optimum is None:
        return None
    table, value, best = optimum
    untuned = tuning_warning(table, best) if value == STEPS else None
    warnings = [untuned] if untuned else []
    answer: list[str] = []
    headlines: dict[str, Estimate] = {}
    numbers = [int(number) for number in best["group"].unique()]
    several = len(numbers) > 1
    labels = {group: group_name(groups, group) if several else "" for group in numbers}
    for group, label in labels.items():
        prefix, suffix = (f"{label}: ", f"_{group}") if several else ("", "")
        group_best = best[best["group"] == group]
        exponent = replace(exponent_of(group_best), group=label)
        headlines[f"learning_rate_exponent{suffix}"] = exponent
        answer.append(prefix + _answer(group_best, exponent, value, quantity))
        open_optima = group_best[~is_bounded(group_best)]
        left_out = "; ".join(f"B = {left_out_reason(row)}" for _, row in open_optima.iterrows())
        warnings += [f"{prefix}Left out of the exponent: {left_out}."] if left_out else []
    full = with_runs(best, table, ("group", "target_loss", "global_batch_size"))
    costs = costs_by_rate(table, value)
    rows, cost, names = costs.pop("row"), costs.pop("cost"), ["sweep_dir", "run_id"]
    costs[value] = np.exp(cost) if value == STEPS else cost
    costs[names] = table.reindex(columns=names).iloc[rows].to_numpy()
    sizes = sorted({*(batches or costs["global_batch_size"])})
    return Section(
        _TITLE,
        answer,
        [_optima(full, labels, value, quantity)],
        learning_rate_charts(costs, full, labels, sizes, quantity),
        warnings,
        headlines,
        chart_data={"learning_rate_costs": costs},
    )


def _answer(best: pd.DataFrame, exponent: Estimate, value: str, quantity: str) -> str:
    inside = best[best["learning_rate"].notna()]
    aim = "to reach the target" if value == STEPS else f"for the final {quantity}"
    if inside.empty:
        return f"No global batch has its best learning rate {aim} inside its grid."
    ends = inside.iloc[[0, -1]] if len(inside) > 1 else inside
    parts = [
        f"{optimum_estimate(row).text(2)} at B = {row['global_batch_size']:g}"
        for _, row in ends.iterrows()
    ]
    text = f"The best learning rate {aim} is {', and '.join(parts)}; exponent"
    if not exponent.is_identified:
        return f"{text} {exponent.note}."
    doubt = f" ({exponent.note})" if exponent.note else ""
    return f"{text} of the global batch {exponent.text(2)}{doubt}. {rules_text(exponent)}"


def _optima(full: pd.DataFrame, labels: Mapping[int, str], value: str, quantity: str) -> Table:
    what, title = f"final {quantity}", f"Learning rate with the lowest final {quantity}"
    if value == STEPS:
        what = "steps to the target, on a log scale,"
        losses = ", ".join(f"{loss:g}" for loss in sorted(full["target_loss"].dropna().unique()))
        title = f"Learning rate with the fewest steps to a {quantity}"
        title += f" of {losses}" if losses else ""
    optima = [_optimum_text(row) for _, row in full.iterrows()]
    return Table(
        "learning_rates",
        title,
        full,
        [
            Column("group", words=labels, is_left=True),
            Column("global_batch_size", "global batch", format="g", is_left=True),
            Column("learning_rate", "best learning rate", texts=optima),
            Column("grid_learning_rate", "best tried", format=3),
            Column("n_learning_rates", "rates tried"),
            Column("n"),
        ],
        footnotes=[full["note"]],
        notes=[
            f"Lowest point of a parabola of {what} in rate^p, with p fitted too, through the best "
            "rate tried and its neighbours, averaged over n seeds; in "
            f"brackets its {LEVEL:.0%} interval (Fieller over seeds, widened by what the grid "
            f"leaves open), from {FEWEST} seeds on.",
        ],
    )


def _optimum_text(row: pd.Series[Any]) -> str:
    """Write an optimum, or the side of the grid on which it lies."""
    estimate = optimum_estimate(row)
    if estimate.is_identified:
        return estimate.text(2)
    ends = [(estimate.low, "≥", 0.0), (estimate.high, "≤", np.inf)]
    bounds = [f"{sign} {significant(end, 2)}" for end, sign, none in ends if end != none]
    return list_text(bounds, "and") or MISSING
