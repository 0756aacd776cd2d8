"""Training losses of decompositions, compared step by step, a few families at a time.

Ten thousand runs have millions of pairs, of which only the figures drawn from them are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.equivalence.decompositions import compared, paired_parts
from batchscape.analysis.equivalence.divergence import growth_of_differences

__all__ = ["ComparedLosses", "compare_losses"]


class ComparedLosses(NamedTuple):
    """What is shown of the pairs."""

    table: pd.DataFrame
    """As `compare_decompositions` returns it."""
    growth: pd.DataFrame
    """As `growth_of_differences` returns it."""
    pairs: pd.DataFrame
    """As `loss_differences` returns them, of the first families that differ."""
    spread: pd.DataFrame
    """As `seed_spread` returns it, of the same families."""
    n_families: int
    """Families with pairs, drawn or not."""


def compare_losses(
    cells: Cells, steps: pd.DataFrame, beyond: float, n_drawn: int
) -> ComparedLosses:
    """Compare the losses of all decompositions with those of their references.

    Parameters
    ----------
    cells : Cells
    steps : DataFrame
        As for `loss_differences`.
    beyond : float
        As for `growth_of_differences`.
    n_drawn : int
        Families whose pairs are kept to be drawn.

    Returns
    -------
    ComparedLosses
    """
    tables, growths, kept, spreads, n_families = [], [], [], [], 0
    left = n_drawn
    for pairs, spread in paired_parts(cells, steps):
        tables.append(compared(cells, pairs, spread))
        growths.append(growth_of_differences(pairs, beyond))
        n_families += pairs["reference"].nunique()
        differ = pairs["difference"].abs().gt(0) & np.isfinite(pairs["difference"])
        families = np.sort(pairs.loc[differ, "reference"].unique())[:left]
        left -= len(families)
        kept.append(pairs[pairs["reference"].isin(families)])
        spreads.append(spread[spread["reference"].isin(families)])
    return ComparedLosses(
        _in_order(tables),
        _in_order(growths),
        pd.concat(kept, ignore_index=True),
        pd.concat(spreads, ignore_index=True),
        n_families,
    )


def _in_order(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Join tables indexed by cell."""
    filled = [table for table in tables if len(table)] or tables[:1]
    return pd.concat(filled).sort_index()
