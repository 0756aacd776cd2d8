"""How the best learning rate grows with the global batch: laws compared, beside an exponent.

The laws are fitted to the logarithms of the optima behind the exponent (`exponent.py`) by least
squares and compared by AICc, the scatter counted as a parameter: fixed, sqrt (Malladi et al. 2022,
arXiv:2205.10287, for Adam), linear (Goyal et al. 2017, arXiv:1706.02677, for SGD), power (the
exponent free), saturating, eps_max / (1 + B_noise/B) (McCandlish et al. 2018, arXiv:1812.06162,
equation 2.6), and surge, 2 eps_max / (sqrt(B_noise/B) + sqrt(B/B_noise)), which falls again above
B_noise (Li et al. 2024, arXiv:2405.14578). With five batches AICc asks twenty more of a law of two
parameters than of one of one; below five it has no value for them.

AICc knows few laws, and with few batches it prefers the nearest of them to the power law whatever
the exponent. So a law is compared only where its own slope over these batches lies inside the
exponent's interval, and none where there is no interval. Compared without that rule, in simulated
sweeps of four and five batches (exponents of 0.28 and 0.75, scatter of 5 to 20 %) a law outside the
interval was preferred in up to 47 % of 60 a case; with seven batches in none.

Source: AICc for small samples: Hurvich and Tsai 1989, Biometrika 76, p. 297.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize

from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.analysis.learning_rate.exponent import (
    exponent_of,
    is_bounded,
    left_out_reason,
)
from batchscape.analysis.numbers import significant
from batchscape.errors import AnalysisError

__all__ = ["LAWS", "LearningRateLaws", "deltas", "learning_rate_laws", "predict"]

_Array = NDArray[np.float64]
_SAME = 2.0
"""Difference in AICc below which two laws are not told apart (Burnham and Anderson 2002, p. 70)."""
_FAR = math.log(1e4)
"""How far outside the batches a noise scale is looked for, as a logarithm."""

LAWS: dict[str, Callable[[_Array, float], _Array]] = {
    "fixed": lambda log_batch, _: 0.0 * log_batch,
    "sqrt": lambda log_batch, _: 0.5 * log_batch,
    "linear": lambda log_batch, _: log_batch,
    "power": lambda log_batch, exponent: exponent * log_batch,
    "saturating": lambda log_batch, noise: -np.logaddexp(0.0, noise - log_batch),
    "surge": lambda log_batch, noise: (
        math.log(2) - np.logaddexp((noise - log_batch) / 2, (log_batch - noise) / 2)
    ),
}
"""Logarithm of the learning rate over the law's coefficient, from the logarithm of the global batch
and the law's second parameter: an exponent, or the logarithm of a noise scale."""


@dataclass(frozen=True)
class LearningRateLaws:
    """The exponent of the best learning rate, and the laws it was compared with."""

    exponent: Estimate
    table: pd.DataFrame
    """One row a law, in the order of `LAWS`: `law`, `parameters`, `coefficient` (`eps_max` of
    saturating and surge), `exponent` (of the power law) or `noise_scale` (samples; NaN where the
    data do not hold it), `slope` (over these batches), `rms` (of residuals, in log learning rate),
    `aicc` (NaN where there are too few batches), `delta_aicc` and `weight` (Akaike's; of the laws
    whose slope lies inside the exponent's interval)."""
    used: pd.DataFrame
    """Rows of the optima behind it."""
    left_out: tuple[str, ...]
    """Which batches are not among them, and why."""
    verdict: str
    """One sentence: which laws the data prefer, or that they do not tell them apart."""


def learning_rate_laws(best: pd.DataFrame) -> LearningRateLaws:
    """Compare laws of how the best learning rate grows with the global batch.

    Parameters
    ----------
    best : DataFrame
        One row a global batch, of one group and one target: `global_batch_size` and
        `learning_rate`; where there are any, `low`, `high` and `note`. As `best_learning_rates`
        returns it. Batches whose optimum is not bounded on both sides are left out, and named;
        of too few seeds to have ends all optima inside their grid count.

    Raises
    ------
    AnalysisError
        If columns are missing, a batch stands in two rows, or a number is not above 0.
    """
    _check(best)
    known = is_bounded(best)
    used = best[known].sort_values("global_batch_size")
    batch = np.log(used["global_batch_size"].to_numpy(dtype=float))
    rate = np.log(used["learning_rate"].to_numpy(dtype=float))
    fits = [_fit(law, batch, rate) for law in LAWS]
    table = pd.DataFrame(fits)
    exponent = exponent_of(best)
    table["delta_aicc"] = deltas(table, exponent)
    likelihood = np.exp(-table["delta_aicc"] / 2)
    table["weight"] = likelihood / likelihood.sum() if likelihood.notna().any() else np.nan
    left_out = tuple(left_out_reason(row) for _, row in best[~known].iterrows())
    return LearningRateLaws(exponent, table, used, left_out, _verdict(table, exponent))


def predict(law: pd.Series[Any], batch_sizes: Sequence[float] | _Array) -> _Array:
    """Compute learning rates from a fitted law.

    Parameters
    ----------
    law : Series
        A row of `LearningRateLaws.table`.
    batch_sizes : sequence of float, shape (n,)

    Returns
    -------
    array, shape (n,)
    """
    name, second = str(law["law"]), float(law["second"])
    logs = LAWS[name](np.log(np.asarray(batch_sizes, dtype=float)), second)
    rates: _Array = float(law["coefficient"]) * np.exp(logs)
    return rates


def _fit(law: str, batch: _Array, rate: _Array) -> dict[str, object]:
    """Fit one law; one that has no value is all NaN."""
    scales = law in {"saturating", "surge"}
    parameters = 1 if law in {"fixed", "sqrt", "linear"} else 2
    row: dict[str, object] = {"law": law, "parameters": parameters}
    nothing = ("coefficient", "exponent", "noise_scale", "second", "slope", "rms", "aicc")
    row |= dict.fromkeys(nothing, math.nan)
    if len(batch) <= parameters:
        return row

    def squares(second: float) -> float:
        return len(batch) * float(np.var(rate - LAWS[law](batch, second)))

    second, held = 0.0, False
    if law == "power":
        second = float(np.polyfit(batch, rate, 1)[0])
        row["exponent"] = second
    elif scales:
        second, held = _noise_scale(squares, batch)
        row["noise_scale"] = math.exp(second) if held else math.nan
    shape = LAWS[law](batch, second)
    centred = batch - batch.mean()
    row |= {"coefficient": math.exp(float(np.mean(rate - shape))), "second": second}
    row["slope"] = float(centred @ shape / (centred @ centred))
    # Optima that follow a law exactly have no scatter, whose logarithm would have no value.
    variance = max(squares(second) / len(batch), 1e-20)
    return row | {"rms": math.sqrt(variance), "aicc": _aicc(variance, len(batch), parameters + 1)}


def _noise_scale(squares: Callable[[float], float], batch: _Array) -> tuple[float, bool]:
    """Search a noise scale; tell whether it lies where the batches can see it."""
    grid = np.linspace(batch.min() - _FAR, batch.max() + _FAR, 400)
    index = int(np.argmin([squares(point) for point in grid]))
    around = grid[max(index - 1, 0)], grid[min(index + 1, len(grid) - 1)]
    found = optimize.minimize_scalar(squares, bounds=around, method="bounded")
    # Far outside the batches the law is a power law, whatever its noise scale.
    held = batch.min() - math.log(10) < found.x < batch.max() + math.log(10)
    return float(found.x), bool(held)


def _aicc(variance: float, n: int, parameters: int) -> float:
    spare = n - parameters - 1
    if spare <= 0:
        return math.nan
    correction = 2 * parameters * (parameters + 1) / spare
    return n * math.log(variance) + 2 * parameters + correction


def deltas(table: pd.DataFrame, exponent: Estimate) -> pd.Series[float]:
    """Return how far each law that the exponent's interval holds lies above the lowest AICc."""
    # Optima that lie on a law exactly have an interval without width.
    rounding = 1e-9
    held = table["slope"].between(exponent.low - rounding, exponent.high + rounding)
    criteria = table["aicc"].astype(float).where(held)
    return criteria.sub(float(criteria.min()))


def _verdict(table: pd.DataFrame, exponent: Estimate) -> str:
    known = table.dropna(subset=["aicc"])
    if known.empty:
        return f"Laws are {NOT_IDENTIFIED}: AICc needs optima of at least four global batches."
    if math.isnan(exponent.low):
        return f"Laws are {NOT_IDENTIFIED}: the exponent has no interval to hold them against."
    order = known.dropna(subset=["delta_aicc"]).sort_values("aicc", kind="stable")
    near = order[order["delta_aicc"] < _SAME]["law"].tolist()
    outside = known.loc[known["delta_aicc"].isna(), "law"].tolist()
    absent = table.loc[table["aicc"].isna(), "law"].tolist()
    rest = f" Outside the exponent's interval: {', '.join(outside)}." if outside else ""
    rest += f" Too few batches for {', '.join(absent)}." if absent else ""
    if not near:
        return f"The exponent's interval holds none of the laws that could be compared.{rest}"
    if len(near) > 1:
        return f"AICc does not tell {' and '.join(near)} apart.{rest}"
    if len(order) == 1:
        return f"The exponent's interval holds {near[0]} alone of the laws compared.{rest}"
    margin = significant(float(order["delta_aicc"].iloc[1]), 2)
    return f"AICc prefers {near[0]}, by {margin} before {order['law'].iloc[1]}.{rest}"


def _check(best: pd.DataFrame) -> None:
    missing = [name for name in ("global_batch_size", "learning_rate") if name not in best]
    if missing or best.empty:
        msg = (
            f"laws need the columns global_batch_size and learning_rate; missing: {missing}"
            if missing
            else "laws need the optimum of at least one global batch; the table has no rows"
        )
        raise AnalysisError(msg)
    batches = pd.to_numeric(best["global_batch_size"], errors="coerce")
    rates = pd.to_numeric(best["learning_rate"], errors="coerce").dropna()
    wrong = [*batches[~(batches > 0) | ~np.isfinite(batches)], *rates[~(rates > 0)]]
    wrong += rates[~np.isfinite(rates)].tolist()
    if wrong:
        msg = f"global_batch_size and learning_rate must be finite and above 0; got {wrong[0]}"
        raise AnalysisError(msg)
    if batches.duplicated().any():
        twice = batches[batches.duplicated()].iloc[0]
        msg = (
            f"laws are fitted to one group and one target, one row a global batch; {twice:g} "
            "stands in several rows. Select one group and one target_loss first"
        )
        raise AnalysisError(msg)
