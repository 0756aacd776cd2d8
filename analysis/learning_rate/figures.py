"""Charts of the cost of each learning rate, and of the optima."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import CROSS, GREY, INK, MARK, shades
from batchscape.analysis.learning_rate.aim import LOSS, STEPS

_MISSED = "missed"
_EDGE = "at the edge"


def learning_rate_charts(
    costs: pd.DataFrame,
    best: pd.DataFrame,
    labels: Mapping[int, str],
    batches: Sequence[float],
    quantity: str,
) -> list[Chart]:
    """Draw costs against learning rates, and optima against global batches."""
    is_log = STEPS in costs
    value = STEPS if is_log else LOSS
    options = {str(group): label for group, label in labels.items()}
    choices = [Choice("group", "Runs", options)] if len(options) > 1 else []
    costs, best = (table.assign(group=table["group"].astype(str)) for table in (costs, best))
    costs["series"] = [f"{batch:g}" for batch in costs["global_batch_size"]]
    is_reached = np.isfinite(costs[value])
    logs = np.log(costs[value]) if is_log else costs[value]
    # The mean of runs of which one missed is none.
    means = (
        logs.where(is_reached)
        .groupby([costs[key] for key in ("group", "series", "learning_rate")])
        .mean(skipna=False)
    )
    means = (np.exp(means) if is_log else means).dropna().reset_index()
    reached, missed = costs[is_reached], costs[~is_reached].drop(columns="series")
    missed[value] = reached[value].max()
    marks = [
        Marks("line", means),
        Marks("point", reached),
        Marks("point", missed, _MISSED, size=24, placed="y"),
    ]
    looks = shades([f"{batch:g}" for batch in batches])
    looks[_MISSED] = Look(GREY.colour, GREY.dark, CROSS)
    return [
        Chart(
            "learning_rate_costs",
            "What each learning rate took",
            "A point a run, the line their mean where all reached; colours are global batches in "
            "samples. Missed: runs that diverged or missed the target, at the height of the "
            "worst.",
            Axis({"learning_rate": "learning rate"}, kind="log"),
            Axis(
                {value: "optimizer steps to target" if is_log else f"final {quantity}"},
                kind="log" if is_log else "linear",
            ),
            marks,
            looks,
            choices=choices,
            panels="group",
            tables=["tables/learning_rate_costs.csv"],
            legend="global batch",
        ),
        *_optima(best, choices),
    ]


def _optima(best: pd.DataFrame, choices: Sequence[Choice]) -> list[Chart]:
    inside = best[best["learning_rate"].notna()]
    edges = best[best["edge"].isin(["lowest", "highest"])]
    rates = [*inside["learning_rate"], *edges["grid_learning_rate"].dropna()]
    if not rates:
        return []
    floor, ceiling = min(rates) / 4, max(rates) * 4
    ends = inside[["low", "high"]].clip(floor, ceiling).add_prefix("learning_rate_")
    at_edge = edges.assign(learning_rate=edges["grid_learning_rate"])
    marks = [
        Marks("interval", inside.join(ends), "best"),
        Marks("point", inside.drop(columns=["low", "high"]), "best", size=40),
        Marks("point", at_edge, _EDGE, size=36),
    ]
    looks = {"best": INK, _EDGE: Look(MARK.colour, symbol="triangle-up", hollow=True)}
    return [
        Chart(
            "learning_rates",
            "Best learning rate by global batch",
            "With its 95 % interval; a batch whose best rate is at the edge of its grid has a "
            "triangle there.",
            Axis(
                {"global_batch_size": "global batch size (samples)"},
                kind="log",
                ticks=best["global_batch_size"].tolist(),
            ),
            Axis(
                {"learning_rate": "best learning rate"},
                kind="log",
                ranges={"learning_rate": (floor, ceiling)},
            ),
            marks,
            looks,
            choices=choices,
            panels="group",
            tables=["tables/learning_rates.csv"],
        )
    ]
