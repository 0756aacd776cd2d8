"""Sweeps whose critical batch size is known: two quadratics, and noise about any curve.

Arrays have axes (sweeps, batch sizes, seeds).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

__all__ = [
    "BATCHES",
    "multiplicative_critical",
    "multiplicative_crossings",
    "multiplicative_steps",
    "noisy_log_steps",
    "noisy_quadratic_loss",
    "noisy_quadratic_steps",
    "sweep_table",
]

Floats = NDArray[np.float64]

BATCHES = tuple(2**k for k in range(4, 12))
"""16 to 2048 samples: both sides of a critical batch size of about 256."""


def sweep_table(log_steps: Floats, batches) -> pd.DataFrame:
    """Write one sweep, shape (batch sizes, seeds), as rows of runs; NaN where there is no run."""
    batch, seed = np.nonzero(~np.isnan(log_steps))
    return pd.DataFrame(
        {
            "global_batch_size": np.asarray(batches)[batch],
            "seed": seed,
            "steps_to_target": np.exp(log_steps[batch, seed]),
        }
    )


def noisy_log_steps(rng, log_steps, n_sweeps, n_seeds, *, sd=0.05, correlation=0.0) -> Floats:
    """Scatter log steps normally; runs of one seed share a part of it at all batch sizes.

    Parameters
    ----------
    log_steps : array, shape (batch sizes,)
    correlation : float
        Between the runs of one seed.
    """
    own = rng.normal(size=(n_sweeps, len(log_steps), n_seeds))
    shared = rng.normal(size=(n_sweeps, 1, n_seeds))
    scatter = math.sqrt(1 - correlation) * own + math.sqrt(correlation) * shared
    return np.asarray(log_steps)[:, None] + sd * scatter


def multiplicative_steps(batches, b0=256.0, c=0.02, drop=100.0) -> Floats:
    """Steps until the mean loss of an isotropic quadratic has fallen by a factor.

    Its gradient noise grows with the gradient, tr(Sigma) = b0 |G|^2, and the learning rate is the
    fraction c of the best one, 1 / (1 + b0/B): the loss shrinks by 1 - (2c - c^2)/(1 + b0/B) a
    step.
    """
    factor = 1 - (2 * c - c * c) / (1 + b0 / np.asarray(batches, dtype=float))
    return -math.log(drop) / np.log(factor)


def multiplicative_critical(b0=256.0, c=0.02) -> float:
    """Fewest samples over fewest steps of `multiplicative_steps`, from its two limits."""
    decay = 2 * c - c * c
    return -b0 * math.log1p(-decay) / decay


def multiplicative_crossings(
    rng, n_sweeps, n_seeds, *, b0=256.0, c=0.02, drop=100.0, shared_sd=0.0, dimensions=64
) -> Floats:
    """Train the multiplicative-noise quadratic by SGD, and read steps to target off its losses.

    The loss is measured every 2048 samples and crosses on a straight line between measurements, as
    in a sweep whose evaluations are paired. Initial losses differ by seed, alike for all batches.
    """
    start = rng.normal(0.0, shared_sd, (n_sweeps, n_seeds))
    found = []
    for batch, typical in zip(BATCHES, multiplicative_steps(BATCHES, b0, c, drop), strict=True):
        rate = c / (1 + b0 / batch)
        spread = b0 / (batch * dimensions)
        every = BATCHES[-1] // batch
        windows = math.ceil(1.5 * typical / every) + 2
        losses = [start]
        for _ in range(windows):
            size = (n_sweeps, n_seeds, every)
            along = (1 - rate) - rate * math.sqrt(spread) * rng.standard_normal(size)
            # The squared length across has so many parts that it is normal.
            others = dimensions - 1
            across = others + math.sqrt(2 * others) * rng.standard_normal(size)
            losses.append(losses[-1] + np.log(along**2 + rate**2 * spread * across).sum(axis=-1))
        found.append(_crossing(np.exp(np.array(losses)), 1 / drop) * every)
    return np.log(np.stack(found, axis=1))


def noisy_quadratic_loss(batch, rate, step, dimensions=10_000) -> float:
    """Mean loss of the noisy quadratic model after some optimizer steps, in closed form.

    Curvatures 1/i, gradient variances equal to them, second moments 1 at the start. Source: Zhang
    et al. 2019, arXiv:1907.04164, section 3.
    """
    h = 1 / np.arange(1, dimensions + 1)
    keep = (1 - rate * h) ** 2
    limit = rate**2 * (h / batch) / (1 - keep)
    return float(0.5 * (h * (limit + keep**step * (1 - limit))).sum())


@cache
def noisy_quadratic_steps(batches=tuple(2**k for k in range(9)), target=0.6) -> tuple[float, ...]:
    """Fewest steps of the noisy quadratic model to a target, at the best constant learning rate."""
    return tuple(_fewest_steps(batch, target) for batch in batches)


def _fewest_steps(batch, target) -> float:
    logs = np.linspace(-4, 0.65, 12)
    best = logs[int(np.argmin([_steps_to(batch, math.exp(log), target) for log in logs]))]
    width = logs[1] - logs[0]
    found = minimize_scalar(
        lambda log: _steps_to(batch, math.exp(log), target),
        bounds=(best - width, min(best + width, 0.69)),
        method="bounded",
        options={"xatol": 1e-3},
    )
    return float(found.fun)


def _steps_to(batch, rate, target) -> float:
    """Bisect for the first crossing of a loss that falls throughout; infinite if there is none."""
    low, high = 0.0, 2.0**20
    if noisy_quadratic_loss(batch, rate, high) > target:
        return math.inf
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        above = noisy_quadratic_loss(batch, rate, middle) > target
        low, high = (middle, high) if above else (low, middle)
    return high


def _crossing(losses, target) -> Floats:
    """Return the interpolated index at which losses first reach the target."""
    at = (losses <= target).argmax(axis=0)
    assert (at > 0).all()
    before, after = (np.take_along_axis(losses, k[None], axis=0)[0] for k in (at - 1, at))
    return at - 1 + (before - target) / (before - after)
