"""Claims that a figure follows one factor and not another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from batchscape.analysis.claims.claim import ClaimResult, few_pairs, found, undecided
from batchscape.analysis.claims.contrasts import (
    CONTRADICTED,
    Contrast,
    Decision,
    all_above,
    all_within,
    both,
    said,
)

__all__ = ["Followed", "follows"]


class Followed(NamedTuple):
    """Contrasts along the factor that should count, and across it; every other factor is equal."""

    along: Sequence[Contrast]
    across: Sequence[Contrast]
    names: tuple[str, str]
    """What varies in each, as half a sentence."""


def follows(
    figure: Followed,
    margin: float,
    definition: str,
    explain: Callable[[str, str], str],
    *,
    reported: Literal["along", "across"],
) -> ClaimResult | None:
    """Judge growth by more than a margin along one factor, and equality within it across.

    Parameters
    ----------
    margin : float
        Of log ratios.
    definition : str
        Of the effect.
    explain : callable
        Makes the explanation of the sizes that decide along and across.
    reported : str
        Whose size is the effect, unless the other alone contradicts the claim.

    Returns
    -------
    ClaimResult or None
        None without any contrast.
    """
    contrasts = [*figure.along, *figure.across]
    if not contrasts:
        return None
    grows, equal = all_above(figure.along, margin), all_within(figure.across, margin)
    if grows is None or equal is None:
        side, missing = (
            (figure.along, figure.names[0]) if grows is None else (figure.across, figure.names[1])
        )
        reason = f"along the {missing}, {few_pairs(side)}"
        return undecided(contrasts, definition, reason)
    usual, other = (grows, equal) if reported == "along" else (equal, grows)
    deciding: Decision = other if other.answer == CONTRADICTED else usual
    explanation = explain(said(grows.deciding, "ratio"), said(equal.deciding, "ratio"))
    answer = both(grows.answer, equal.answer)
    return found(answer, deciding.deciding, contrasts, explanation, definition, ratio=True)
