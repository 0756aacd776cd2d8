"""A forest of the effects behind the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from matplotlib.figure import Figure

from batchscape.analysis.claims.claim import Verdict
from batchscape.analysis.claims.rules import CONTRADICTED, SUPPORTED, Answer
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.figures.style import PAGE_IN, plain_ticks
from batchscape.analysis.report.topic import Picture

__all__ = ["draw_claims"]

_LOOKS: dict[Answer, tuple[str, str]] = {
    SUPPORTED: ("#0072B2", "filled: the claim is supported"),
    CONTRADICTED: ("#D55E00", "open: it is contradicted"),
}
"""Okabe and Ito's blue and vermilion, and what a caption says of the marker."""
_MOST_ROWS = 24


def draw_claims(settled: Sequence[Verdict]) -> list[Picture]:
    """Draw the ratios among the effects of settled claims.

    Returns
    -------
    list of Picture
        None where there are fewer than two ratios, or too many to read.
    """
    ratios = [v for v in settled if v.effect.definition.startswith("ratio") and v.effect.low > 0]
    if not 2 <= len(ratios) <= _MOST_ROWS:
        return []
    figure = Figure(figsize=(PAGE_IN, 0.7 + 0.27 * len(ratios)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.6)
    marked = []
    for answer, (colour, words) in _LOOKS.items():
        rows = [row for row, verdict in enumerate(ratios) if verdict.verdict == answer]
        effects = [ratios[row].effect for row in rows]
        ends = [(e.value - e.low, (e.high if e.high < inf else e.value) - e.value) for e in effects]
        if effects:
            axes.errorbar(
                [effect.value for effect in effects],
                rows,
                xerr=np.transpose(ends),
                fmt="o",
                markersize=5,
                color=colour,
                markerfacecolor=colour if answer == SUPPORTED else "white",
                label=answer,
            )
            marked.append(words)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 1 / 1.1), max(high, 1.1))
    several = len({verdict.context for verdict in ratios}) > 1
    names = [f"{v.claim.id}\n({v.context})" if several else v.claim.id for v in ratios]
    axes.set_yticks(range(len(ratios)), names)
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ratio, as the claim's rule defines it (log scale)")
    plain_ticks(axes.xaxis)
    figure.legend(loc="outside upper right", ncols=2)
    caption = (
        f"Effects behind the verdicts that are ratios, with their {LEVEL:.0%} intervals; "
        f"{'; '.join(marked)}. What is compared, and the threshold of each rule, stand in the "
        "table."
    )
    return [Picture("claims", caption, figure)]
