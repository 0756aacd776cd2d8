"""Other intervals for the logarithm of the two-term critical batch size, to compare coverage."""

from __future__ import annotations

import numpy as np
from scipy import stats

from batchscape.analysis.tradeoff.forms import Data, fit_form
from batchscape.analysis.tradeoff.intervals import PATHS, intervals
from batchscape.analysis.tradeoff.noise import noise_of

__all__ = ["ALTERNATIVES"]

LEVEL = 0.95


def fitted(x, values):
    """Log critical batch sizes of sweeps, shape (sweeps, batch sizes, seeds)."""
    means = values.mean(axis=2)
    data = Data(x, means)
    return fit_form(data, "two_term")[0][:, 1]


def score(x, values):
    means = values.mean(axis=2)
    data = Data(x, means)
    theta = fit_form(data, "two_term")[0]
    low, high = intervals(data, noise_of(values), theta, PATHS["two_term"]["critical_batch_size"])
    return theta[:, 1] + low, theta[:, 1] + high


def jackknife_t(x, values):
    """Leave out one seed at all batch sizes, and fit again."""
    n = values.shape[2]
    centre = fitted(x, values)
    others = np.stack([fitted(x, np.delete(values, k, axis=2)) for k in range(n)])
    error = np.sqrt((n - 1) / n * ((others - others.mean(axis=0)) ** 2).sum(axis=0))
    reach = stats.t.ppf((1 + LEVEL) / 2, n - 1) * error
    return centre - reach, centre + reach


def block_bootstrap(x, values):
    """Percentiles over seeds drawn with all their runs."""
    rng = np.random.default_rng(1)
    n = values.shape[2]
    draws = [fitted(x, values[:, :, rng.integers(0, n, n)]) for _ in range(200)]
    return tuple(np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0))


def cell_bootstrap(x, values):
    """Percentiles over seeds drawn for every batch size apart."""
    rng = np.random.default_rng(1)
    n, batches = values.shape[2], np.arange(values.shape[1])[:, None]
    draws = [
        fitted(x, values[:, batches, rng.integers(0, n, (len(batches), n))]) for _ in range(200)
    ]
    return tuple(np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0))


def bootstrap_t(x, values):
    """Quantiles of the studentised estimate over seeds drawn with all their runs."""
    rng = np.random.default_rng(1)
    n = values.shape[2]
    centre, error = _studentised(x, values)
    ratios = []
    for _ in range(200):
        chosen = rng.integers(0, n, n)
        # With one seed only there is no error to divide by.
        if len(set(chosen)) > 1:
            drawn, resampled = _studentised(x, values[:, :, chosen])
            ratios.append((drawn - centre) / resampled)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return centre - high * error, centre - low * error


def _studentised(x, values):
    n = values.shape[2]
    others = np.stack([fitted(x, np.delete(values, k, axis=2)) for k in range(n)])
    spread = ((others - others.mean(axis=0)) ** 2).sum(axis=0)
    return fitted(x, values), np.sqrt((n - 1) / n * spread) + 1e-12


ALTERNATIVES = {
    "score": score,
    "jackknife-t": jackknife_t,
    "bootstrap-t": bootstrap_t,
    "percentile bootstrap by seed": block_bootstrap,
    "percentile bootstrap by cell": cell_bootstrap,
}
