"""Figures of the trade-off: steps, samples, their trade, residuals, and critical batch sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    MaxNLocator,
    NullLocator,
    StrMethodFormatter,
)

from batchscape.analysis.figures.style import COLUMN_IN, PAGE_IN, PALETTE, plain_ticks
from batchscape.analysis.tradeoff.fit import TradeoffFit
from batchscape.analysis.tradeoff.forms import FORMULAS, Floats

__all__ = ["draw_critical_batches", "draw_tradeoff"]

_FIT, _POINT, _MARK = "#0072B2", "#000000", "#D55E00"


def draw_tradeoff(fit: TradeoffFit) -> Figure | None:
    """Draw one fit: steps and samples over batch size, residuals, and steps against samples.

    Returns
    -------
    Figure or None
        None where nothing was fitted.
    """
    if fit.fitted is None:
        return None
    figure = Figure(figsize=(PAGE_IN, 4.6), layout="constrained")
    panels = figure.subplots(2, 2)
    sizes = fit.batches["global_batch_size"].to_numpy(dtype=np.float64)
    places = np.geomspace(sizes.min() / 1.3, sizes.max() * 1.3, 200)
    curve = fit.predict(places)
    _draw_against_batch(panels[0, 0], fit, curve, np.ones_like(places))
    panels[0, 0].set_ylabel("optimizer steps to target")
    _draw_against_batch(panels[0, 1], fit, curve, places)
    panels[0, 1].set_ylabel("samples to target")
    panels[0, 0].legend(loc="lower left")
    _draw_residuals(panels[1, 0], fit)
    _draw_trade(panels[1, 1], fit, curve)
    return figure


def draw_critical_batches(
    curves: Mapping[str, pd.DataFrame], scales: Mapping[str, float] | None = None
) -> Figure | None:
    """Draw the critical batch size over target losses, easier targets to the left.

    Parameters
    ----------
    curves : mapping of str to DataFrame
        As `critical_batch_curve` returns it, by label; an empty label has no legend.
    scales : mapping of str to float, optional
        Gradient noise scale in samples, drawn as a line, by the same labels.

    Returns
    -------
    Figure or None
        None where no curve has two targets with an estimate.
    """
    shown = {
        label: curve[curve["critical_batch_size"].notna()].sort_values("target_loss")
        for label, curve in curves.items()
    }
    if not any(len(curve) > 1 for curve in shown.values()):
        return None
    figure = Figure(figsize=(COLUMN_IN, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set_yscale("log")
    for index, (label, curve) in enumerate(shown.items()):
        colour = PALETTE[index % len(PALETTE)]
        value = curve["critical_batch_size"].to_numpy()
        ends = curve[["critical_batch_size_low", "critical_batch_size_high"]].to_numpy().T
        with_ends = np.isfinite(ends).all(axis=0)
        axes.plot(curve["target_loss"], value, "o-", color=colour, markersize=3, linewidth=1)
        axes.errorbar(
            curve["target_loss"].to_numpy()[with_ends],
            value[with_ends],
            np.abs(ends - value)[:, with_ends],
            fmt="none",
            color=colour,
            linewidth=0.8,
            capsize=2,
            label=label or "critical batch size",
        )
        scale = (scales or {}).get(label, math.nan)
        if math.isfinite(scale):
            name = f"noise scale, {label}" if label else "gradient noise scale"
            axes.axhline(scale, color=colour, linestyle=(0, (5, 2)), linewidth=0.9, label=name)
    axes.invert_xaxis()
    # Numbers of targets that are close are long.
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel("target loss")
    axes.set_ylabel("critical batch size (samples)")
    plain_ticks(axes.yaxis)
    if len(shown) > 1 or scales:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _draw_against_batch(
    axes: Axes,
    fit: TradeoffFit,
    curve: pd.DataFrame,
    factor: Floats,
) -> None:
    """Draw steps, or samples with the batch sizes as factor, over the batch size."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = curve["global_batch_size"]
    axes.plot(sizes, curve["steps"] * factor, color=_FIT, linewidth=1.2, label=FORMULAS[fit.form])
    if curve["low"].notna().any():
        ends = (curve["low"] * factor, curve["high"] * factor)
        axes.fill_between(sizes, *ends, color=_FIT, alpha=0.18, linewidth=0, label="its interval")
    is_steps = bool((factor == 1).all())
    runs = fit.runs
    each = runs["steps_to_target"] * (1 if is_steps else runs["global_batch_size"])
    axes.plot(
        runs["global_batch_size"], each, ".", color=_POINT, markersize=3.5, label="runs", zorder=3
    )
    _mark_critical(axes, fit)
    axes.set_xlabel("global batch size (samples)")
    axes.set_xlim(sizes.min(), sizes.max())
    _batch_ticks(axes, fit.batches["global_batch_size"])
    plain_ticks(axes.yaxis)


def _mark_critical(axes: Axes, fit: TradeoffFit) -> None:
    critical = fit.critical_batch_size
    if not critical.is_identified:
        return
    axes.axvline(critical.value, color=_MARK, linewidth=1, label="critical batch size")
    if math.isfinite(critical.low) and math.isfinite(critical.high):
        axes.axvspan(critical.low, critical.high, color=_MARK, alpha=0.13, linewidth=0)


def _draw_residuals(axes: Axes, fit: TradeoffFit) -> None:
    axes.axhline(0, color=_FIT, linewidth=1.2)
    table = fit.batches
    residual, error = table["residual"], table["residual_error"].fillna(0)
    value, low, high = (100 * np.expm1(residual + sign * error) for sign in (0, -1, 1))
    axes.errorbar(
        table["global_batch_size"],
        value,
        [value - low, high - value],
        fmt="o",
        color=_POINT,
        markersize=3,
        linewidth=0.8,
        capsize=2,
    )
    reach = 1.25 * max(high.max(), -low.min(), 0.1)
    axes.set_ylim(-reach, reach)
    axes.set_xlabel("global batch size (samples)")
    axes.set_ylabel("steps above the fit (%)")
    _batch_ticks(axes, table["global_batch_size"])


def _draw_trade(axes: Axes, fit: TradeoffFit, curve: pd.DataFrame) -> None:
    """Draw steps against samples, each relative to its least where the form has one."""
    a, critical, _ = fit.parameters
    least_steps, least_samples = a, a * critical
    table = fit.batches
    axes.set_xscale("log")
    axes.set_yscale("log")
    samples = curve["steps"] * curve["global_batch_size"]
    axes.plot(samples / least_samples, curve["steps"] / least_steps, color=_FIT, linewidth=1.2)
    axes.plot(
        table["samples"] / least_samples,
        table["steps"] / least_steps,
        "o",
        color=_POINT,
        markersize=3,
    )
    for _, row in table.iloc[_spread(len(table), 6)].iterrows():
        axes.annotate(
            f"{row['global_batch_size']:g}",
            (row["samples"] / least_samples, row["steps"] / least_steps),
            # The curve bends away from this side.
            xytext=(-3, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=6,
        )
    at_critical = fit.predict(np.array([critical]))["steps"][0]
    if fit.critical_batch_size.is_identified:
        place = (at_critical * critical / least_samples, at_critical / least_steps)
        axes.plot(*place, "D", color=_MARK, markersize=4, zorder=4)
    axes.set_xlabel(
        "samples / fewest samples" if fit.form == "two_term" else "samples / (a x critical)"
    )
    axes.set_ylabel("steps / fewest steps")
    axes.margins(0.12)
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)


def _batch_ticks(axes: Axes, sizes: pd.Series[float]) -> None:
    """Name at most six of the batch sizes on a logarithmic axis."""
    chosen = sizes.iloc[_spread(len(sizes), 6)]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(chosen)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _spread(n: int, most: int) -> list[int]:
    """Choose at most so many of n places, at equal distances from the first."""
    return list(range(0, n, math.ceil(n / most)))
