"""A forest of the effects behind the verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from batchscape.analysis.claims.claim import Verdict
from batchscape.analysis.claims.contrasts import SUPPORTED
from batchscape.analysis.figures.style import PAGE_IN

__all__ = ["draw_claims"]

_COLOURS = {True: "#0072B2", False: "#D55E00"}
"""Okabe and Ito's blue for supported, vermilion for contradicted."""
_MOST_ROWS = 24


def draw_claims(settled: Sequence[Verdict]) -> Figure | None:
    """Draw the ratios among the effects of settled claims.

    Returns
    -------
    Figure or None
        None where there are fewer than two ratios, or too many to read.
    """
    ratios = [v for v in settled if v.effect.definition.startswith("ratio") and v.effect.low > 0]
    if not 2 <= len(ratios) <= _MOST_ROWS:
        return None
    figure = Figure(figsize=(PAGE_IN, 0.7 + 0.27 * len(ratios)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    several = len({verdict.context for verdict in ratios}) > 1
    for row, verdict in enumerate(ratios):
        effect, is_supported = verdict.effect, verdict.verdict == SUPPORTED
        colour = _COLOURS[is_supported]
        high = effect.high if math.isfinite(effect.high) else effect.value
        axes.plot([effect.low, high], [row, row], color=colour, linewidth=1.4)
        axes.plot(
            effect.value,
            row,
            marker="o",
            markersize=5,
            color=colour,
            markerfacecolor=colour if is_supported else "white",
            linestyle="none",
        )
    axes.axvline(1, color="black", linewidth=0.6)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 1 / 1.1), max(high, 1.1))
    names = [f"{v.claim.id}\n({v.context})" if several else v.claim.id for v in ratios]
    axes.set_yticks(range(len(ratios)), names)
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ratio, as the claim's rule defines it (log scale)")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 1.2, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    handles = [
        Line2D([], [], color=_COLOURS[True], marker="o", label="supported"),
        Line2D(
            [], [], color=_COLOURS[False], marker="o", markerfacecolor="white", label="contradicted"
        ),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    return figure
