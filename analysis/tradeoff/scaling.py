"""How the critical batch size grows with model or data size: a power law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from batchscape.analysis.estimates import TWO_SIDED, Estimate
from batchscape.errors import AnalysisError

__all__ = ["ScalingLaw", "scaling_law"]


@dataclass(frozen=True)
class ScalingLaw:
    """critical = coefficient x size^exponent."""

    coefficient: Estimate
    exponent: Estimate
    table: pd.DataFrame
    """`size`, `critical`, `fitted`, `residual` (of the logarithm)."""

    def predict(self, size: float) -> float:
        """Return the critical batch size at a size, by the law."""
        return float(self.coefficient.value * size**self.exponent.value)


def scaling_law(sizes: Sequence[float], critical: Sequence[float]) -> ScalingLaw:
    """Fit a power law by least squares on logarithms.

    Parameters
    ----------
    sizes : sequence of float, shape (n,)
        Such as parameters in millions.
    critical : sequence of float, shape (n,)
        Critical batch sizes of one definition and unit; missing ones are left out.

    Raises
    ------
    AnalysisError
        If fewer than two different sizes are left, or a number is not above zero.

    Notes
    -----
    Intervals are by Student's t with n - 2 degrees of freedom. They hold the scatter about the law,
    whatever its cause, and so need not know that of each point.

    Source: Zhang et al. 2024, arXiv:2410.21676, section 4: 93.20 N^0.468, N in millions.
    """
    if len(sizes) != len(critical):
        msg = f"every size needs a critical batch size, got {len(sizes)} and {len(critical)}"
        raise AnalysisError(msg)
    table = pd.DataFrame({"size": sizes, "critical": critical}, dtype="float64").dropna()
    if not (np.isfinite(table) & (table > 0)).all(axis=None):
        msg = "sizes and critical batch sizes must be finite and above zero (missing is allowed)"
        raise AnalysisError(msg)
    if table["size"].nunique() < 2:
        msg = f"a power law needs two different sizes, got {table['size'].nunique()}"
        raise AnalysisError(msg)
    x, y = np.log(table["size"].to_numpy()), np.log(table["critical"].to_numpy())
    n, centre = len(x), float(x.mean())
    square = float(((x - centre) ** 2).sum())
    slope = float(((x - centre) * y).sum()) / square
    constant = float(y.mean()) - slope * centre
    residual = y - constant - slope * x
    reach = math.nan
    if n > 2:
        reach = float(stdtrit(n - 2, TWO_SIDED) * np.sqrt((residual**2).sum() / (n - 2)))
    of_slope = reach / math.sqrt(square)
    of_constant = reach * math.sqrt(1 / n + centre**2 / square)
    method = f"least squares on logarithms, t with {n - 2} degrees of freedom over {n} sizes"
    note = None if n > 2 else "two sizes: no interval"
    law = "critical = coefficient x size^exponent"
    low, high = (math.exp(constant + sign * of_constant) for sign in (-1, 1))
    return ScalingLaw(
        Estimate(
            math.exp(constant), low, high, n, "samples", method, f"coefficient of {law}", note
        ),
        Estimate(
            slope, slope - of_slope, slope + of_slope, n, "", method, f"exponent of {law}", note
        ),
        table.assign(fitted=np.exp(y - residual), residual=residual).reset_index(drop=True),
    )
