"""Training losses of decompositions, compared step by step."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.equivalence.decompositions import (
    compared,
    loss_differences,
    seed_spread,
)
from batchscape.analysis.equivalence.divergence import growth_of_differences

__all__ = ["ComparedLosses", "compare_losses"]


class ComparedLosses(NamedTuple):
    """What is shown of the pairs."""

    table: pd.DataFrame
    """As `compare_decompositions` returns it."""
    growth: pd.DataFrame
    """As `growth_of_differences` returns it."""
    pairs: pd.DataFrame
    """As `loss_differences` returns them."""
    spread: pd.DataFrame
    """As `seed_spread` returns it."""


def compare_losses(cells: Cells, steps: pd.DataFrame, beyond: float) -> ComparedLosses:
    """Compare the losses of all decompositions with those of their references.

    Parameters
    ----------
    cells : Cells
    steps : DataFrame
        As for `loss_differences`.
    beyond : float
        As for `growth_of_differences`.
    """
    pairs, spread = loss_differences(cells, steps), seed_spread(cells, steps)
    table, growth = compared(cells, pairs, spread), growth_of_differences(pairs, beyond)
    return ComparedLosses(table, growth, pairs, spread)
