"""A forest of the effects behind the verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from batchscape.analysis.claims.claim import Verdict
from batchscape.analysis.claims.rules import SUPPORTED
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.figures.style import PAGE_IN, plain_ticks
from batchscape.analysis.report.topic import Picture

__all__ = ["draw_claims"]

_COLOURS = {True: "#0072B2", False: "#D55E00"}
"""Okabe and Ito's blue for supported, vermilion for contradicted."""
_MOST_ROWS = 24


def draw_claims(settled: Sequence[Verdict]) -> Picture | None:
    """Draw the ratios among the effects of settled claims.

    Returns
    -------
    Picture or None
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
    plain_ticks(axes.xaxis)
    found = {verdict.verdict == SUPPORTED for verdict in ratios}
    handles = [
        Line2D(
            [],
            [],
            color=_COLOURS[is_supported],
            marker="o",
            markerfacecolor=_COLOURS[is_supported] if is_supported else "white",
            label=word,
        )
        for is_supported, word in ((True, "supported"), (False, "contradicted"))
        if is_supported in found
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    marked = {True: "filled: the claim is supported", False: "open: it is contradicted"}
    said = "; ".join(
        marked[is_supported] for is_supported in (True, False) if is_supported in found
    )
    caption = (
        f"Effects behind the verdicts that are ratios, with their {LEVEL:.0%} intervals; {said}. "
        "What is compared, and the threshold of each rule, stand in the table."
    )
    return Picture("claims", caption, figure)
