"""Laws of the learning rate on the linear scale, and how far their noise batch is known.

`laws.py` fits the logarithms of the optima, so that each counts by its relative error. Published
fits often take the learning rates themselves, so that the largest count most: here both can be set
side by side. Each scale has an AICc of its own, which says nothing of the other's; on both a law is
compared only where its slope over these batches lies inside the exponent's interval (`laws.py`).

The noise batch of a saturating or surge law, B_noise, has the interval of its profile: all values
at which the sum of squares exceeds the least one by no more than the F quantile with 1 and n - 2
degrees of freedom allows. Where the batches do not reach to one side of it, it has no end there.

Source: Bates and Watts 1988, Nonlinear Regression Analysis and Its Applications, section 6.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize, stats

from batchscape.analysis.estimates import LEVEL, NOT_IDENTIFIED, Estimate
from batchscape.analysis.learning_rate.exponent import (
    UNBOUNDED,
    exponent_of,
    is_bounded,
    lacks_ends,
)
from batchscape.analysis.learning_rate.laws import LAWS, deltas
from batchscape.analysis.numbers import significant
from batchscape.analysis.tradeoff.forms import aicc
from batchscape.errors import AnalysisError

__all__ = ["linear_laws", "noise_batch"]

_Scale = Literal["log", "linear"]
"""What is squared: differences of log learning rates, or of learning rates."""

_Array = NDArray[np.float64]
_FAR = math.log(1e4)
"""How far outside the batches a noise batch is looked for, as a logarithm."""
_NEAR = math.log(10)
"""How far outside the batches it still counts as found there."""
_EXPONENTS = (-3.0, 3.0)
_POINTS = 801


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

    Notes
    -----
    Source: as `learning_rate_laws` for the laws; Hurvich and Tsai 1989 for AICc; Bates and Watts
    1988, section 6.1, for the intervals.
    """
    batch, rate = _optima(best)
    rows = []
    for law in LAWS:
        scales = law in {"saturating", "surge"}
        parameters = 1 if law in {"fixed", "sqrt", "linear"} else 2
        row: dict[str, object] = {"law": law, "parameters": parameters}
        empty = ("coefficient", "exponent", "noise_scale", "slope", "rms", "aicc")
        row |= dict.fromkeys((*empty, "noise_scale_low", "noise_scale_high"), math.nan)
        rows.append(row)
        if len(batch) <= parameters:
            continue
        squares = _squares(law, batch, rate, "linear")
        second = 0.0
        if law == "power":
            second = _least(squares, np.linspace(*_EXPONENTS, _POINTS))
            row["exponent"] = second
        elif scales:
            second = _least(squares, _grid(batch))
            found = noise_batch(best, law, scale="linear")
            names = ("noise_scale", "noise_scale_low", "noise_scale_high")
            row |= zip(names, (found.value, found.low, found.high), strict=True)
        logs, centred = LAWS[law](batch, second), batch - batch.mean()
        row["slope"] = float(centred @ logs / (centred @ centred))
        shape = np.exp(logs)
        least = float(squares(np.array([second]))[0])
        row["coefficient"] = float(shape @ np.exp(rate) / (shape @ shape))
        row["rms"] = math.sqrt(least / len(batch))
        # Relative to the rates' own size, for AICc takes what is below rounding for nothing.
        criterion = aicc(least / float(np.exp(2 * rate).mean()), len(batch), parameters)
        row["aicc"] = criterion if math.isfinite(criterion) else math.nan
    table = pd.DataFrame(rows)
    return table.assign(delta_aicc=deltas(table, exponent_of(best)))


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

    Notes
    -----
    Source: Bates and Watts 1988, Nonlinear Regression Analysis, section 6.1 (profile); for the laws
    McCandlish et al. 2018, arXiv:1812.06162, equation 2.6, and Li et al. 2024, arXiv:2405.14578.
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
    squares, grid = _squares(law, batch, rate, scale), _grid(batch)
    value = _least(squares, grid)
    least = float(squares(np.array([value]))[0])
    limit = least * (1 + float(stats.f.ppf(LEVEL, 1, n - 2)) / (n - 2))

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


def _optima(best: pd.DataFrame) -> tuple[_Array, _Array]:
    """Return the logarithms of batches and learning rates of the optima that count."""
    missing = [name for name in ("global_batch_size", "learning_rate") if name not in best]
    if missing:
        msg = f"laws need the columns global_batch_size and learning_rate; missing: {missing}"
        raise AnalysisError(msg)
    used = best[is_bounded(best)].sort_values("global_batch_size")
    numbers = used[["global_batch_size", "learning_rate"]].to_numpy(dtype=float)
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        msg = "global_batch_size and learning_rate must be finite and above 0"
        raise AnalysisError(msg)
    batch, rate = np.log(numbers).T
    return batch, rate


def _squares(law: str, batch: _Array, rate: _Array, scale: _Scale) -> Callable[[_Array], _Array]:
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


def _grid(batch: _Array) -> _Array:
    return np.linspace(batch.min() - _FAR, batch.max() + _FAR, _POINTS)


def _least(squares: Callable[[_Array], _Array], grid: _Array) -> float:
    """Find the lowest point on a grid, and between its neighbours."""
    at = int(np.argmin(squares(grid)))
    around = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])
    found = optimize.minimize_scalar(
        lambda point: float(squares(np.array([point]))[0]),
        bounds=around,
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(found.x)
