"""The figure of learning rates: a curve each global batch, and the optima with fitted laws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from batchscape.analysis.figures.style import PAGE_IN, plain_ticks
from batchscape.analysis.learning_rate.laws import LearningRateLaws, predict

__all__ = ["draw_learning_rates"]

_LAW_COLOURS = {
    "fixed": "#000000",
    "sqrt": "#0072B2",
    "linear": "#D55E00",
    "power": "#009E73",
}
_MOST_LAWS = 3
_STAR: dict[str, Any] = {
    "marker": "*",
    "markersize": 8,
    "markeredgecolor": "black",
    "markeredgewidth": 0.5,
    "zorder": 3,
}
_LABELS = {
    "steps_to_target": "optimizer steps to target",
    "final_eval_loss": "final held-out loss",
}


def draw_learning_rates(
    costs: pd.DataFrame,
    best: pd.DataFrame,
    laws: LearningRateLaws,
    value: str,
    shades: Mapping[float, str],
) -> Figure:
    """Draw costs against learning rates, and optima against global batches.

    Parameters
    ----------
    costs : DataFrame
        Of one group and target, as `costs_by_rate` returns it.
    best : DataFrame
        Of the same, as `best_learning_rates` returns it.
    value : str
        What is minimised.
    shades : mapping of float to str
        Colours of the global batches of all groups, as `style.shades_of` returns them.
    """
    figure = Figure(figsize=(PAGE_IN, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {batch: shades[batch] for batch in sorted(costs["global_batch_size"].unique())}
    _draw_costs(left, costs, best, value, colours)
    _draw_optima(right, best, laws, colours)
    figure.legend(
        handles=[
            Line2D([], [], color=colour, marker="o", markersize=3, label=f"{batch:g}")
            for batch, colour in colours.items()
        ],
        title="global batch (samples)",
        title_fontsize=7,
        loc="outside lower center",
        ncols=8,
    )
    return figure


def _draw_costs(
    axes: Axes,
    costs: pd.DataFrame,
    best: pd.DataFrame,
    value: str,
    colours: Mapping[float, str],
) -> None:
    axes.set_xscale("log")
    logarithmic = value == "steps_to_target"
    if logarithmic:
        axes.set_yscale("log")
    for index, (batch, colour) in enumerate(colours.items()):
        own = costs[costs["global_batch_size"] == batch]
        mean = own.groupby("learning_rate")["cost"].mean()
        shown = mean.where(np.isfinite(mean))
        heights = np.exp(shown) if logarithmic else shown
        axes.plot(shown.index, heights, "o-", color=colour, markersize=3, linewidth=1)
        missed = mean.index[~np.isfinite(mean)]
        top = np.full(len(missed), 0.98 - 0.03 * index)
        axes.plot(
            missed, top, "x", color=colour, markersize=3, transform=axes.get_xaxis_transform()
        )
        row = best[best["global_batch_size"] == batch].iloc[0]
        rate = float(row["learning_rate"])
        if np.isfinite(rate):
            drawn = np.log(heights.dropna())
            rates = np.log(drawn.index.to_numpy(dtype=float))
            height = float(np.exp(np.interp(np.log(rate), rates, drawn.to_numpy(dtype=float))))
            axes.plot(rate, height, color=colour, **_STAR)
    axes.margins(y=0.2)
    plain_ticks(axes.xaxis)
    if logarithmic:
        plain_ticks(axes.yaxis)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(_LABELS.get(value, value.replace("_", " ")))


def _draw_optima(
    axes: Axes, best: pd.DataFrame, laws: LearningRateLaws, colours: Mapping[float, str]
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    inside = best[best["learning_rate"].notna()]
    edges = best[best["edge"].isin(["lowest", "highest"])]
    everything = [*inside["learning_rate"], *best["grid_learning_rate"].dropna()]
    if not everything:
        return
    floor, ceiling = min(everything) / 4, max(everything) * 4
    for _, row in inside.iterrows():
        rate, colour = float(row["learning_rate"]), colours[row["global_batch_size"]]
        ends = np.nan_to_num([row["low"], row["high"]], nan=rate).clip(floor / 2, ceiling * 2)
        axes.errorbar(
            row["global_batch_size"],
            rate,
            yerr=np.abs(ends - rate)[:, None],
            color=colour,
            elinewidth=0.8,
            capsize=2,
            **_STAR,
        )
    for side, marker in (("lowest", "v"), ("highest", "^")):
        own = edges[edges["edge"] == side]
        axes.scatter(
            own["global_batch_size"],
            own["grid_learning_rate"],
            s=36,
            marker=marker,
            facecolors="white",
            edgecolors=[colours[batch] for batch in own["global_batch_size"]],
        )
    _draw_laws(axes, best, laws)
    axes.set_ylim(floor, ceiling)
    plain_ticks(axes.yaxis)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("global batch (samples)")
    axes.set_ylabel("best learning rate")


def _draw_laws(axes: Axes, best: pd.DataFrame, laws: LearningRateLaws) -> None:
    """Draw the laws that describe the optima best."""
    fitted = laws.table.dropna(subset=["delta_aicc"]).nsmallest(_MOST_LAWS, "aicc")
    sizes = best["global_batch_size"]
    batches = np.geomspace(sizes.min(), sizes.max(), 100)
    for _, law in fitted.iterrows():
        name = str(law["law"])
        text = f"{name}, ΔAICc {law['delta_aicc']:.1f}"
        axes.plot(batches, predict(law, batches), color=_LAW_COLOURS[name], linewidth=1, label=text)
    if len(fitted):
        axes.legend(loc="lower right")
