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

Published fits often take the learning rates themselves, so that the largest count most:
`linear_laws`. Each scale has an AICc of its own, which says nothing of the other's.

The noise batch of a saturating or surge law, B_noise, has the interval of its profile: all values
at which the sum of squares exceeds the least one by no more than the F quantile with 1 and n - 2
degrees of freedom allows. Where the batches do not reach to one side of it, it has no end there.

Sources: AICc for small samples: Hurvich and Tsai 1989, Biometrika 76, p. 297; profiles: Bates and
Watts 1988, Nonlinear Regression Analysis and Its Applications, section 6.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize
from scipy.special import stdtrit

from batchscape.analysis.estimates import NOT_IDENTIFIED, TWO_SIDED, Estimate
from batchscape.analysis.learning_rate.exponent import (
    UNBOUNDED,
    exponent_of,
    is_bounded,
    is_limited_by_grid,
    lacks_ends,
    left_out_reason,
)
from batchscape.analysis.numbers import significant
from batchscape.analysis.tradeoff.forms import aicc
from batchscape.errors import AnalysisError

__all__ = [
    "LAWS",
    "LearningRateLaws",
    "learning_rate_laws",
    "linear_laws",
    "noise_batch",
    "predict",
]

_Scale = Literal["log", "linear"]
"""What is squared: differences of log learning rates, or of learning rates."""

_Array = NDArray[np.float64]
_SAME = 2.0
"""Difference in AICc below which two laws are not told apart (Burnham and Anderson 2002, p. 70)."""
_FAR = math.log(1e4)
"""How far outside the batches a noise scale is looked for, as a logarithm."""
_NEAR = math.log(10)
"""How far outside the batches it still counts as found: beyond, a law is a power law, whatever it
is."""
_EXPONENTS = (-3.0, 3.0)
_POINTS = 801

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
    whose slope lies inside the exponent's interval; NaN where the grid of rates, not the scatter of
    optima, makes that interval)."""
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
    batch, rate = _optima(best)
    known = is_bounded(best)
    used = best[known].sort_values("global_batch_size")
    table = _fit_laws(batch, rate, "log")
    held = table["law"].isin(["saturating", "surge"])
    if len(batch):
        ends = batch.min() - _NEAR, batch.max() + _NEAR
        held &= table["second"].between(*ends, inclusive="neither")
    table["noise_scale"] = np.exp(table["second"].where(held))
    exponent, is_coarse = exponent_of(best), is_limited_by_grid(best)
    # Where the grid decides how wide the interval is, the scatter of optima ranks no laws.
    table["delta_aicc"] = np.nan if is_coarse else _deltas(table, exponent)
    likelihood = np.exp(-table["delta_aicc"] / 2)
    table["weight"] = likelihood / likelihood.sum() if likelihood.notna().any() else np.nan
    left_out = tuple(left_out_reason(row) for _, row in best[~known].iterrows())
    verdict = _verdict_of_grid(table, exponent) if is_coarse else _verdict(table, exponent)
    return LearningRateLaws(exponent, table, used, left_out, verdict)


def linear_laws(best: pd.DataFrame) -> pd.DataFrame:
    """Fit the laws of `learning_rate_laws` by least squares of the learning rates themselves.

    Parameters
    ----------
    best : DataFrame
        One row a global batch: `global_batch_size` and `learning_rate`; where there are any, `low`
        and `high`. As for `learning_rate_laws`, and the same optima count.

    Returns
    -------
    DataFrame
        One row a law: `law`, `parameters`, `coefficient`, `exponent` (of the power law),
        `noise_scale`, `noise_scale_low`, `noise_scale_high` (samples; of saturating and surge),
        `slope` (of the logarithms over these batches), `rms` (of residuals, in learning rate),
        `aicc` and `delta_aicc` (of the laws whose slope lies inside the exponent's interval); NaN
        where there are too few batches.

    Raises
    ------
    AnalysisError
        If columns are missing, or a number is not above 0.
    """
    table = _fit_laws(*_optima(best), "linear").drop(columns="second").set_index("law")
    names = ["noise_scale", "noise_scale_low", "noise_scale_high"]
    table = table.assign(**dict.fromkeys(names, math.nan))
    for law in ("saturating", "surge"):
        found = noise_batch(best, law, scale="linear")
        table.loc[law, names] = found.value, found.low, found.high
    table = table.reset_index()
    return table.assign(delta_aicc=_deltas(table, exponent_of(best)))


def noise_batch(best: pd.DataFrame, law: str = "saturating", *, scale: _Scale = "log") -> Estimate:
    """Estimate the noise batch of a law of the learning rate, with its interval.

    Parameters
    ----------
    best : DataFrame
        As for `linear_laws`.
    law : {"saturating", "surge"}
        eps_max / (1 + B_noise/B), or 2 eps_max / (sqrt(B_noise/B) + sqrt(B/B_noise)).
    scale : {"log", "linear"}
        What is fitted: log learning rates, or learning rates.

    Returns
    -------
    Estimate
        In samples; not identified where the interval lacks an end (is 0 or infinite; the other is
        a bound), it lies more than a factor of 10 outside the batches, or there are fewer than 3.
        Without an interval where an optimum has none, as for the exponent.

    Raises
    ------
    AnalysisError
        If the law has no noise batch, columns are missing, or a number is not above 0.
    """
    if law not in {"saturating", "surge"} or scale not in {"log", "linear"}:
        msg = (
            "the laws with a noise batch are saturating and surge, fitted on the scale 'log' or "
            f"'linear'; got {law=}, {scale=}"
        )
        raise AnalysisError(msg)
    batch, rate = _optima(best)
    n, missing = len(batch), math.nan
    definition = f"B_noise of the {law} law, by least squares on the {scale} scale"
    if n < 3:
        why = f"{n} global batches have a bounded optimum, 3 needed"
        return Estimate.unknown(why, n, definition, unit="samples")
    squares, grid = _squares_of(law, batch, rate, scale), _grid_of(batch)
    value = _least(squares, grid)
    lowest = float(squares(np.array([value]))[0])
    limit = lowest * (1 + float(stdtrit(n - 2, TWO_SIDED)) ** 2 / (n - 2))

    def excess(point: float) -> float:
        return float(squares(np.array([point]))[0]) - limit

    inside = np.append(grid[squares(grid) <= limit], value)
    ends = []
    for end, edge, none in ((inside.min(), grid[0], 0.0), (inside.max(), grid[-1], math.inf)):
        step = math.copysign(grid[1] - grid[0], edge - end)
        beyond = float(end + step)
        if end == edge or excess(beyond) <= 0:
            ends.append(none)
        else:
            ends.append(math.exp(optimize.brentq(excess, float(end), beyond)))
    low, high = ends
    near = batch.min() - _NEAR < value < batch.max() + _NEAR
    held = near and low > 0 and high < math.inf
    method, note = f"profile of the sum of squares, F with 1 and {n - 2} degrees of freedom", None
    if lacks_ends(best[is_bounded(best)]):
        low, high, method, note = missing, missing, "none", UNBOUNDED
    if not held:
        said = ["the batches leave it open" if near else "the batches do not reach it"]
        said += [f"at least {significant(low, 2)}"] if low > 0 else []
        said += [f"at most {significant(high, 2)}"] if high < math.inf else []
        note = f"{NOT_IDENTIFIED}: {', '.join(said)}"
    number = math.exp(value) if held else missing
    return Estimate(number, low, high, n, "samples", method, definition, note)


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


def _optima(best: pd.DataFrame) -> tuple[_Array, _Array]:
    """Return the logarithms of batches and learning rates of the optima that count."""
    _check(best)
    used = best[is_bounded(best)].sort_values("global_batch_size")
    batch, rate = np.log(used[["global_batch_size", "learning_rate"]].to_numpy(dtype=float)).T
    return batch, rate


def _fit_laws(batch: _Array, rate: _Array, scale: _Scale) -> pd.DataFrame:
    """Fit every law by least squares.

    `second` is the parameter that `LAWS` take; NaN where there are too few batches.
    """
    rows = []
    for law, shape_of in LAWS.items():
        parameters = 1 if law in {"fixed", "sqrt", "linear"} else 2
        row: dict[str, object] = {"law": law, "parameters": parameters}
        names = ("coefficient", "exponent", "noise_scale", "second", "slope", "rms", "aicc")
        rows.append(row | dict.fromkeys(names, math.nan))
        if len(batch) <= parameters:
            continue
        squares, second = _squares_of(law, batch, rate, scale), 0.0
        if law == "power" and scale == "log":
            second = float(np.polyfit(batch, rate, 1)[0])
        elif parameters > 1:
            grid = np.linspace(*_EXPONENTS, _POINTS) if law == "power" else _grid_of(batch)
            second = _least(squares, grid)
        shape, centred = shape_of(batch, second), batch - batch.mean()
        misfit = float(squares(np.array([second]))[0])
        # AICc takes what is below rounding for nothing, relative to the size of a rate.
        size, curve = 1.0, np.exp(shape)
        coefficient = math.exp(float(np.mean(rate - shape)))
        if scale == "linear":
            size = float(np.exp(2 * rate).mean())
            coefficient = float(curve @ np.exp(rate) / (curve @ curve))
        criterion = aicc(misfit / size, len(batch), parameters)
        rows[-1] |= {
            "coefficient": coefficient,
            "exponent": second if law == "power" else math.nan,
            "second": second,
            "slope": float(centred @ shape / (centred @ centred)),
            "rms": math.sqrt(misfit / len(batch)),
            "aicc": criterion if math.isfinite(criterion) else math.nan,
        }
    return pd.DataFrame(rows)


def _squares_of(law: str, batch: _Array, rate: _Array, scale: _Scale) -> Callable[[_Array], _Array]:
    """Return the least sum of squares over the coefficient, at second parameters of shape (m,)."""

    def squares(second: _Array) -> _Array:
        shape = np.stack([LAWS[law](batch, float(point)) for point in second])
        if scale == "log":
            away = rate - shape
            return np.asarray(((away - away.mean(axis=1, keepdims=True)) ** 2).sum(axis=1))
        curve, wanted = np.exp(shape), np.exp(rate)
        coefficient = curve @ wanted / (curve**2).sum(axis=1)
        return np.asarray(((wanted - coefficient[:, None] * curve) ** 2).sum(axis=1))

    return squares


def _grid_of(batch: _Array) -> _Array:
    """Return where a noise scale is looked for, as logarithms."""
    return np.linspace(batch.min() - _FAR, batch.max() + _FAR, _POINTS)


def _least(squares: Callable[[_Array], _Array], grid: _Array) -> float:
    """Find the lowest point on a grid, and between its neighbours."""
    at = int(np.argmin(squares(grid)))
    found = optimize.minimize_scalar(
        lambda point: float(squares(np.array([point]))[0]),
        bounds=(float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(found.x)


def _deltas(table: pd.DataFrame, exponent: Estimate) -> pd.Series[float]:
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


def _verdict_of_grid(table: pd.DataFrame, exponent: Estimate) -> str:
    """Say which laws the grid of rates leaves, where it is too coarse to rank them."""
    is_inside = table["slope"].between(exponent.low, exponent.high)
    inside, outside = table.loc[is_inside, "law"], table.loc[~is_inside, "law"]
    rest = f" Outside the exponent's interval: {', '.join(outside)}." if len(outside) else ""
    names = " and ".join(inside)
    if len(inside) == 1:
        return f"The exponent's interval holds {names} alone of the laws compared.{rest}"
    apart = f"does not tell {names} apart" if names else "holds none of the laws"
    return f"The grid of learning rates is too coarse to rank laws, and {apart}.{rest}"


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
