"""How the best learning rate grows with the global batch: laws compared, beside an exponent.

The laws are straight lines through the logarithms of the optima behind the exponent
(`exponent.py`), fitted by least squares and compared by AICc, the scatter counted as a parameter:
fixed, sqrt (Malladi et al. 2022, arXiv:2205.10287, for Adam), linear (Goyal et al. 2017,
arXiv:1706.02677, for SGD), and power, whose exponent is free. With five batches AICc asks twenty
more of the power law than of the others; below five it has no value for it.

AICc knows few laws, and with few batches it prefers the nearest of them to the power law whatever
the exponent. So a law is compared only where its own exponent lies inside the interval of the
fitted one, and none where there is no interval. Compared without that rule, in simulated sweeps of
four and five batches (exponents of 0.28 and 0.75, scatter of 5 to 20 %) a law outside the interval
was preferred in up to 48 % of 60 a case; with seven batches in none.

Source: AICc for small samples: Hurvich and Tsai 1989, Biometrika 76, p. 297.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.analysis.learning_rate.aim import Optima
from batchscape.analysis.learning_rate.exponent import (
    exponent_of,
    is_bounded,
    is_limited_by_grid,
    left_out_reason,
)
from batchscape.analysis.numbers import significant
from batchscape.analysis.tradeoff.forms import aicc
from batchscape.errors import AnalysisError
from batchscape.text import list_text

_Array = NDArray[np.float64]
_SAME = 2.0
"""Difference in AICc below which two laws are not told apart (Burnham and Anderson 2002, p. 70)."""

LAWS: dict[str, float | None] = {"fixed": 0.0, "sqrt": 0.5, "linear": 1.0, "power": None}
"""Exponent of the global batch; None: fitted."""


@dataclass(frozen=True)
class LearningRateLaws:
    """The exponent of the best learning rate, and the laws it was compared with."""

    exponent: Estimate
    table: pd.DataFrame
    """One row a law, in the order of `LAWS`: `law`, `parameters`, `coefficient` and `exponent` (the
    learning rate is the coefficient times the global batch to the exponent), `rms` (of residuals,
    in log learning rate), `aicc` (NaN where there are too few batches) and `delta_aicc` (of the
    laws whose exponent lies inside the interval of the fitted one; NaN where the grid of rates, not
    the scatter of optima, makes that interval)."""
    optima: pd.DataFrame
    """Rows of `best_learning_rates` behind it."""
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
    bounded = is_bounded(best)
    optima = best[bounded].sort_values("global_batch_size")
    table = _fit_laws(
        *np.log(optima[["global_batch_size", "learning_rate"]].to_numpy(dtype=float)).T
    )
    exponent = exponent_of(best)
    is_coarse = is_limited_by_grid(exponent, best[bounded])
    # Where the grid decides how wide the interval is, the scatter of optima ranks no laws.
    table["delta_aicc"] = np.nan
    if not is_coarse:
        # Optima that lie on a law exactly have an interval without width, but for rounding.
        is_inside = table["exponent"].between(exponent.low - 1e-9, exponent.high + 1e-9)
        criteria = table["aicc"].astype(float).where(is_inside)
        table["delta_aicc"] = criteria - criteria.min()
    left_out = tuple(left_out_reason(row) for _, row in best[~bounded].iterrows())
    verdict = _verdict_of_grid(table, exponent) if is_coarse else _verdict(table, exponent)
    return LearningRateLaws(exponent, table, optima, left_out, verdict)


def laws_of_most_optima(optima: Optima) -> tuple[LearningRateLaws, pd.DataFrame]:
    """Compare the laws of the group with most optima; also return the rows behind them."""
    counts = optima.best.groupby("group")["learning_rate"].transform("count")
    group = optima.best["group"].iloc[int(counts.to_numpy().argmax())]
    laws = learning_rate_laws(optima.best[optima.best["group"].eq(group)])
    rows = optima.table
    if "group" in rows:
        rows = rows[rows["group"].eq(group)]
    batches = laws.optima["global_batch_size"]
    return laws, rows[rows["global_batch_size"].isin(batches)] if len(batches) else rows


def predict(law: pd.Series[Any], batch_sizes: Sequence[float] | _Array) -> _Array:
    """Compute learning rates at batch sizes, shape (n,), from a row of `LearningRateLaws.table`."""
    sizes: _Array = np.asarray(batch_sizes, dtype=float)
    return float(law["coefficient"]) * sizes ** float(law["exponent"])


def _fit_laws(batch: _Array, rate: _Array) -> pd.DataFrame:
    """Fit every law to logarithms, by least squares; NaN where there are too few batches."""
    rows: list[dict[str, object]] = []
    for law, exponent in LAWS.items():
        parameters = 1 if exponent is not None else 2
        rows.append({"law": law, "parameters": parameters})
        if len(batch) <= parameters:
            continue
        slope = float(np.polyfit(batch, rate, 1)[0]) if exponent is None else exponent
        away = rate - slope * batch
        misfit = float(((away - away.mean()) ** 2).sum())
        criterion = aicc(misfit, len(batch), parameters)
        rows[-1] |= {
            "coefficient": math.exp(float(np.mean(away))),
            "exponent": slope,
            "rms": math.sqrt(misfit / len(batch)),
            "aicc": criterion if math.isfinite(criterion) else math.nan,
        }
    names = ["law", "parameters", "coefficient", "exponent", "rms", "aicc"]
    return pd.DataFrame(rows, columns=names)


def _verdict(table: pd.DataFrame, exponent: Estimate) -> str:
    with_aicc = table.dropna(subset=["aicc"])
    if with_aicc.empty:
        return f"Laws are {NOT_IDENTIFIED}: AICc needs optima of at least four global batches."
    if math.isnan(exponent.low):
        return f"Laws are {NOT_IDENTIFIED}: the exponent has no interval to hold them against."
    order = with_aicc.dropna(subset=["delta_aicc"]).sort_values("aicc", kind="stable")
    near = order[order["delta_aicc"] < _SAME]["law"].tolist()
    outside = with_aicc.loc[with_aicc["delta_aicc"].isna(), "law"].tolist()
    absent = table.loc[table["aicc"].isna(), "law"].tolist()
    suffix = f" Outside the exponent's interval: {', '.join(outside)}." if outside else ""
    suffix += f" Too few batches for {', '.join(absent)}." if absent else ""
    if not near:
        return f"The exponent's interval holds none of the laws that could be compared.{suffix}"
    if len(near) > 1:
        return f"AICc does not tell {list_text(near, 'and')} apart.{suffix}"
    if len(order) == 1:
        return f"The exponent's interval holds {near[0]} alone of the laws compared.{suffix}"
    margin = significant(float(order["delta_aicc"].iloc[1]), 2)
    return f"AICc prefers {near[0]}, by {margin} before {order['law'].iloc[1]}.{suffix}"


def _verdict_of_grid(table: pd.DataFrame, exponent: Estimate) -> str:
    """Say which laws the grid of rates leaves, where it is too coarse to rank them."""
    is_inside = table["exponent"].between(exponent.low, exponent.high)
    inside, outside = table.loc[is_inside, "law"], table.loc[~is_inside, "law"]
    suffix = f" Outside the exponent's interval: {', '.join(outside)}." if len(outside) else ""
    names = list_text(inside, "and")
    if len(inside) == 1:
        return f"The exponent's interval holds {names} alone of the laws compared.{suffix}"
    apart = f"does not tell {names} apart" if names else "holds none of the laws"
    return f"The grid of learning rates is too coarse to rank laws, and {apart}.{suffix}"


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
