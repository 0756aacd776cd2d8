r"""The exponent of the best learning rate in the global batch.

It is the slope of log learning rate on log global batch by least squares. Two things make it
uncertain, and the half-width of its interval is the root of the sum of their squares:

* the scatter around the line, with the t quantile of two degrees of freedom less than there are
  batches. A seed whose optima are all too high shifts the line and leaves its slope alone;
* what the grid of rates cannot tell. Each optimum may lie anywhere within a factor of its value
  (`grid_factor` of `best_learning_rates`: the neighbours where one of them diverged, the shape of
  the curve elsewhere), and the slope is open by the worst of these places. Optima on one grid may
  lie on a line exactly: their scatter says nothing of the grid.

Only optima count whose interval has two ends: rates on both sides are worse, beyond the noise. The
others are known to lie in their grid by chance alone, which pulls all of them to its middle and the
exponent to zero, with little scatter. Which batches stay then depends on the grid, so that where
some are left out the interval is no narrower than what the optima's own intervals make of it. With
fewer than three seeds no optimum has ends: those inside their grid give an exponent, and no
interval.

Notes
-----
Coverage at 95 % of six batches a factor of 2 apart, three seeds, noise of 0.1 in the cost: the
lowest, to a percent, over the true exponents 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75 and 1, of 300 sweeps
each (seed 14; the binomial interval of 299 in 300 begins at 98.2 %). On a shared grid all batches
have the same rates, a moving grid follows the root of the batch. x is the logarithm of the rate
over the best one; a wall is where every run diverges. In brackets: by the scatter alone.

============================ ====== ============ ============
cost                         factor shared grid  moving grid
============================ ====== ============ ============
x^2/2, wall from x = 0.05 on 2      100 % (48 %) 100 % (52 %)
\                            4      100 % (25 %) 100 % (19 %)
x^2/2, wall from x = 0.3 on  2      100 % (51 %) 100 % (51 %)
\                            4      100 % (19 %) 100 % (21 %)
x^2/2                        2      100 % (93 %) 100 % (93 %)
\                            4      100 % (91 %) 100 % (91 %)
e^x - x                      2      100 % (94 %) 100 % (92 %)
\                            4      100 % (91 %) 100 % (91 %)
============================ ====== ============ ============

Rules that name an exponent are held against its interval: fixed (0), sqrt (0.5; Malladi et al.
2022, arXiv:2205.10287, for Adam) and linear (1; Goyal et al. 2017, arXiv:1706.02677, for SGD).

The intervals hold the truth more often than they say: each takes the worst places that the
optima may have. `python tests/analysis/learning_rate/test_coverage.py` prints the table.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import Estimate, t_reach
from batchscape.analysis.joins import column_of
from batchscape.text import count_text, list_text

_FEWEST = 3
"""Optima behind an exponent: with two there is no scatter around the line."""
_UNBOUNDED = "no interval: with fewer than three seeds nothing shows that the optima are bounded"
_RULES = {"fixed": 0.0, "sqrt": 0.5, "linear": 1.0}
_DEFINITION = "slope of log best learning rate on log global batch, by least squares"


def exponent_of(best: pd.DataFrame) -> Estimate:
    """Estimate the exponent from the optima that are bounded on both sides.

    Parameters
    ----------
    best : DataFrame
        One row a global batch, of one group and one target, as `best_learning_rates` returns it:
        `global_batch_size` and `learning_rate`; where there are any, `low`, `high`, `grid_factor`
        and `note`. Of too few seeds to have ends all optima inside their grid count.
    """
    bounded = is_bounded(best)
    optima = best[bounded]
    n = len(optima)
    if n < _FEWEST:
        batches = count_text(n, "global batch has", "global batches have")
        why = f"{batches} an optimum bounded on both sides by worse rates, {_FEWEST} needed"
        return Estimate.unknown(why, n, _DEFINITION)
    columns = ["global_batch_size", "learning_rate", "grid_factor", "low", "high"]
    numbers = optima.reindex(columns=columns).astype(float).fillna({"grid_factor": 1.0})
    batch, rate, grid, *ends = np.log(numbers.to_numpy()).T
    centred = batch - batch.mean()
    spread = float(centred @ centred)
    slope = float(centred @ rate) / spread
    residuals = rate - rate.mean() - slope * centred
    error = math.sqrt(float(residuals @ residuals) / (n - 2) / float(centred @ centred))
    if "low" in optima and np.isnan(ends).any():
        return Estimate(slope, math.nan, math.nan, n, "", "none", _DEFINITION, _UNBOUNDED)
    # Wherever in its bracket each optimum lies: no interval is narrower than what that leaves open.
    half = math.hypot(t_reach(error, n - 2), float(np.abs(centred) @ grid) / spread)
    method = f"t with {n - 2} degrees of freedom over {n} global batches, and their grids of rates"
    # Which batches stay depends on the grid, and so does their scatter.
    if not bounded.all():
        reach = np.abs(np.subtract(ends, rate)).max(axis=0)
        least = float(np.linalg.norm(centred * reach)) / spread
        method += ", not below what their own intervals say" if least > half else ""
        half = max(half, least)
    return Estimate(slope, slope - half, slope + half, n, "", method, _DEFINITION)


def rules_text(exponent: Estimate) -> str:
    """Say which rules the exponent's interval holds."""
    if math.isnan(exponent.low):
        return "Without its interval no rule can be held against it."
    # Optima that lie on a line exactly have an interval without width, but for rounding.
    low, high = exponent.low - 1e-9, exponent.high + 1e-9
    inside = [name for name, power in _RULES.items() if low <= power <= high]
    outside = [name for name in _RULES if name not in inside]
    suffix = f" Outside the exponent's interval: {', '.join(outside)}." if outside else ""
    return f"Rules that the interval holds: {', '.join(inside) or 'none'}.{suffix}"


def is_bounded(best: pd.DataFrame) -> pd.Series[bool]:
    """Tell which batches have an optimum with two ends, or one of too few seeds to have ends."""
    is_open = column_of(best, "low").eq(0) | column_of(best, "high").eq(math.inf)
    return best["learning_rate"].notna() & ~is_open


def left_out_reason(row: pd.Series[Any]) -> str:
    """Name a batch and why its optimum counts neither for the exponent nor for laws."""
    note = row.get("note")
    text = note if isinstance(note, str) else "no optimum"
    if pd.notna(row["learning_rate"]):
        sides = ["below"] * bool(row.get("low") == 0)
        sides += ["above"] * bool(row.get("high") == math.inf)
        text = f"no rate is worse beyond the noise {list_text(sides)} the best one"
    return f"{row['global_batch_size']:g}: {text}"
