"""How far the mean log steps of each batch size may be off, from the runs of its seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from batchscape.analysis.tradeoff.forms import Floats

Rows = NDArray[np.bool_] | NDArray[np.int64]
"""Which data sets: a mask or numbers."""


@dataclass(frozen=True)
class Noise:
    """Spread of cell means that seeds cause."""

    deviations: Floats
    """Each run's share in the error of its cell mean, shape (data sets, batches, seeds); their
    squares sum to the variance of a mean, their products over seeds to covariances."""
    single: Floats
    """Variance of cells of one run, shape (data sets, batches), 0 elsewhere."""
    parts: NDArray[np.int64]
    """Which batch sizes are linked by shared seeds: a number for each."""
    counts: NDArray[np.int64]
    """Runs of each batch size."""

    def rows(self, chosen: Rows) -> Noise:
        """Keep some of the data sets."""
        return Noise(self.deviations[chosen], self.single[chosen], self.parts, self.counts)

    @property
    def n_parts(self) -> int:
        """Number of groups of batch sizes that share seeds."""
        return int(self.parts.max()) + 1

    def variance(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return variances and degrees of freedom of weighted sums of cell means.

        Parameters
        ----------
        weights : array, shape (data sets, batches)

        Returns
        -------
        tuple of array, shape (data sets,)
        """
        by_part, degrees_of = [], []
        for part in range(self.n_parts):
            part_weights = weights * (self.parts == part)
            sums = np.einsum("nb,nbs->ns", part_weights, self.deviations)
            by_part.append((sums**2).sum(axis=1) + (part_weights**2 * self.single).sum(axis=1))
            degrees_of.append(self._degrees(part_weights))
        variances = np.array(by_part)
        total = variances.sum(axis=0)
        spread = (variances**2 / np.array(degrees_of)).sum(axis=0)
        degrees = np.divide(total**2, spread, out=np.ones_like(total), where=spread > 0)
        return total, degrees

    def _degrees(self, weights: Floats) -> Floats:
        """Return degrees of freedom of weighted sums over the cells of one part.

        By shares of cells in the variance, if all runs scatter alike: Satterthwaite's figure, but
        no more than the mean of n - 1, for cells share seeds whose errors may go together. Cells of
        few runs that decide a sum then decide its degrees; with n runs everywhere they are n - 1.
        """
        several = self.counts > 1
        own_degrees = np.where(several, self.counts - 1, 1)
        shares = weights**2 / self.counts * several
        total = shares.sum(axis=1)
        has_weight = total > 0
        shares = np.divide(shares, total[:, None], out=shares, where=has_weight[:, None])
        separate_degrees = np.divide(
            1.0, (shares**2 / own_degrees).sum(axis=1), out=np.ones_like(total), where=has_weight
        )
        pooled = float(own_degrees[several].sum())
        return np.where(
            has_weight, np.minimum(separate_degrees, (shares * own_degrees).sum(axis=1)), pooled
        )


def noise_of(values: Floats) -> Noise | None:
    """Learn from the runs how far cell means may be off.

    Parameters
    ----------
    values : array, shape (data sets, batches, seeds)
        Log steps; NaN where a seed was not run at a batch size, alike in all data sets.

    Returns
    -------
    Noise or None
        None where no batch size has two runs.
    """
    present = ~np.isnan(values[0])
    counts = present.sum(axis=1)
    several = counts > 1
    if not several.any():
        return None
    filled = np.where(present, values, 0.0)
    means = filled.sum(axis=2, keepdims=True) / counts[:, None]
    residuals = np.where(present, values - means, 0.0)
    freedom = np.where(several, counts * (counts - 1), 1)
    deviations = residuals / np.sqrt(freedom)[:, None] * several[:, None]
    pooled = (residuals**2).sum(axis=(1, 2)) / (counts - 1).sum()
    single = pooled[:, None] * ~several
    return Noise(deviations, single, _linked(present), counts)


def _linked(present: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number the groups of batch sizes that share seeds, directly or through others."""
    batches, seeds = present.shape
    where = np.nonzero(present)
    links = (np.ones(len(where[0])), (where[0], batches + where[1]))
    graph = coo_array(links, shape=(batches + seeds, batches + seeds))
    _, labels = connected_components(graph, directed=False)
    _, parts = np.unique(labels[:batches], return_inverse=True)
    return np.asarray(parts, dtype=np.int64)
