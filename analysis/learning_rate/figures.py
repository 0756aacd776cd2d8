"""Charts of the cost of each learning rate, and of the optima."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import CROSS, GREY, INK, MARK, shades

_MISSED = "missed"
_EDGE = "at the edge"
_VALUES = ("steps_to_target", "final_eval_loss")


def learning_rate_charts(
    costs: pd.DataFrame,
    best: pd.DataFrame,
    labels: Mapping[int, str],
    batches: Sequence[float],
    quantity: str,
) -> list[Chart]:
    """Draw costs against learning rates, and optima against global batches."""
    value = next(name for name in costs if name in _VALUES)
    is_log = value == "steps_to_target"
    options = {str(group): label for group, label in labels.items()}
    choices = [Choice("group", "Runs", options)] if len(options) > 1 else []
    costs, best = (table.assign(group=table["group"].astype(str)) for table in (costs, best))
    sizes = {f"{batch:g}": batch for batch in batches}
    costs = costs.assign(series=[f"{batch:g}" for batch in costs["global_batch_size"]])
    keys = ["group", "series", "learning_rate"]
    reached = costs[np.isfinite(costs[value])]
    logs = np.log(reached[value]) if is_log else reached[value]
    means = logs.groupby([reached[key] for key in keys]).mean().reset_index()
    means[value] = np.exp(means[value]) if is_log else means[value]
    all_reached = costs.groupby(keys)[value].agg(lambda values: np.isfinite(values).all())
    means = means[all_reached.loc[pd.MultiIndex.from_frame(means[keys])].to_numpy()]
    missed = costs[~np.isfinite(costs[value])].drop(columns="series")
    missed = missed.assign(**{value: reached[value].max()})
    batch_looks = shades([*sizes])
    marks = [Marks("line", means), Marks("point", reached)]
    marks += [Marks("point", missed, _MISSED, size=24, placed="y")] if len(missed) else []
    series = set(costs["series"])
    looks = {name: look for name, look in batch_looks.items() if name in series}
    looks |= {_MISSED: Look(GREY.colour, GREY.dark, CROSS)} if len(missed) else {}
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
        ),
        *_optima(best, choices),
    ]


def _optima(best: pd.DataFrame, choices: Sequence[Choice]) -> list[Chart]:
    inside = best[best["learning_rate"].notna()]
    edges = best[best["edge"].isin(["lowest", "highest"])]
    rates = [*inside["learning_rate"], *edges["grid_learning_rate"].dropna()]
    if not rates:
        return []
    ends = {f"learning_rate_{end}": inside[end] for end in ("low", "high")}
    floor, ceiling = min(rates) / 4, max(rates) * 4
    bars = inside.assign(**{name: sizes.clip(floor, ceiling) for name, sizes in ends.items()})
    at_edge = edges.assign(learning_rate=edges["grid_learning_rate"])
    marks = [
        Marks("interval", bars, "best"),
        Marks("point", inside.drop(columns=["low", "high"]), "best", size=40),
        Marks("point", at_edge, _EDGE, size=36),
    ]
    marks = [mark for mark in marks if len(mark.table)]
    looks = {"best": INK, _EDGE: Look(MARK.colour, symbol="triangle-up", hollow=True)}
    names = {mark.name for mark in marks}
    looks = {name: look for name, look in looks.items() if name in names}
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
