"""Checks of a fit: residuals, other forms, lack of fit."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.special import fdtrc

from batchscape.analysis.tradeoff.forms import (
    FORMULAS,
    Data,
    Floats,
    aicc,
    fit_form,
    jacobian,
    null_residuals,
    predicted,
)
from batchscape.analysis.tradeoff.measurements import Measurements
from batchscape.analysis.tradeoff.noise import Noise


def residuals(
    data: Data,
    theta: Floats | None,
    measurements: Measurements,
    noise: Noise | None,
    parameters: int,
) -> pd.DataFrame:
    """Set measured beside fitted steps, with the standard error of each residual from seeds."""
    fitted = np.full_like(data.y, math.nan) if theta is None else predicted(data.x, theta)
    error = np.full(len(measurements.batches), math.nan)
    if noise is not None and theta is not None:
        slope = jacobian(data.x, theta)[0]
        basis = np.linalg.qr(slope[:, :parameters])[0]
        maker = np.eye(len(slope)) - basis @ basis.T
        error = np.sqrt([float(noise.variance(row[None])[0][0]) for row in maker])
    return pd.DataFrame(
        {
            "global_batch_size": measurements.batches,
            "runs": measurements.counts,
            "steps": np.exp(data.y[0]),
            "fitted_steps": np.exp(fitted[0]),
            "residual": (data.y - fitted)[0],
            "residual_error": error,
            "samples": np.exp(data.y[0]) * measurements.batches,
        }
    )


def form_table(data: Data) -> pd.DataFrame:
    """Compare all forms on the same means by AICc over batch sizes."""
    nulls = null_residuals(data)
    squares = {name: (float(values[0]), 1) for name, values in nulls.items()}
    squares["two_term"] = (float(fit_form(data, "two_term")[1][0]), 2)
    n = len(data.x)
    if n >= 4:
        squares["free_exponent"] = (float(fit_form(data, "free_exponent")[1][0]), 3)
    formulas = {
        "perfect_scaling": "S = b/B",
        "constant": "S = a",
        "two_term": FORMULAS["two_term"],
        "free_exponent": FORMULAS["free_exponent"],
    }
    rows = {
        name: {
            "formula": formulas[name],
            "parameters": count,
            "rms_residual": math.sqrt(value / n),
            "aicc": aicc(value, n, count),
        }
        for name, (value, count) in squares.items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("form")
    return table.assign(delta=table["aicc"] - table["aicc"].min())


def lack_of_fit(data: Data, theta: Floats, measurements: Measurements, parameters: int) -> float:
    """Test whether residuals of the means are larger than runs scatter about them.

    The F test of lack of fit. A shift that a seed gives to all batch sizes alike cannot be a
    residual, so the scatter is what is left of log steps after batch size and seed.

    Parameters
    ----------
    data : Data
        One data set.
    theta : array, shape (1, 3)
    parameters : int
        Fitted ones.

    Returns
    -------
    float
        Probability; NaN where there is one seed or no batch size to spare.
    """
    present = ~np.isnan(measurements.log_steps)
    batch, seed = np.nonzero(present)
    values = measurements.log_steps[present]
    shared = present.sum(axis=0).max() > 1
    columns = [np.eye(present.shape[0])[batch]]
    columns += [np.eye(present.shape[1])[seed]] if shared else []
    design = np.hstack(columns)
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    scatter = float(((values - design @ solution) ** 2).sum())
    degrees, spare = len(values) - int(rank), len(data.x) - parameters
    if degrees < 1 or spare < 1:
        return math.nan
    misfit = float((measurements.counts * (data.y - predicted(data.x, theta))[0] ** 2).sum())
    if scatter == 0:
        return math.nan
    return float(fdtrc(spare, degrees, (misfit / spare) / (scatter / degrees)))
