"""The gradient noise scale of a run, from the squared norms in its rows.

With the mean gradient g_b of b samples, |g_b|^2 is |G|^2 + tr(S)/b on average: G is the gradient of
the whole loss, S the covariance of the gradient of one sample. Two batch sizes give both unknowns
without bias, and the scale is their ratio: the batch at which the noise is as large as the signal.
A sample with more labels has more weight here, as in the loss.

Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

NOISE_COLUMNS = ("global_batch_size", "gradient_norm", "small_batch_size", "small_gradient_square")
"""Columns of optimizer steps that an estimate needs."""


def objective_depends_on_batch(not_invariant: object) -> bool:
    """Return whether the objective of a run depends on the batch, so that it has no noise scale.

    The difference of their gradients is then more than noise: with batch normalisation, or a loss
    that is not a sum over samples. Dropout counts as noise.

    Parameters
    ----------
    not_invariant : str or missing
        The label of the run.
    """
    if not isinstance(not_invariant, str):
        return False
    return any(not reason.startswith("dropout") for reason in not_invariant.split("; "))


def noise_samples(steps: pd.DataFrame) -> pd.DataFrame:
    """Compute both unknowns from every optimizer step in which the noise was sampled.

    Parameters
    ----------
    steps : DataFrame
        Rows of optimizer steps, with the columns in `NOISE_COLUMNS`.

    Returns
    -------
    DataFrame
        Rows with finite numbers only, under their index: `noise` (an unbiased estimate of tr(S)),
        `signal` (one of |G|^2), `b_small` and `b_big`. Single estimates may be negative.
    """
    numbers = (steps[name].to_numpy(dtype=float, na_value=np.nan) for name in NOISE_COLUMNS)
    big, big_norm, small, small_square = numbers
    with np.errstate(over="ignore", invalid="ignore"):
        big_square = big_norm**2
        samples = pd.DataFrame(
            {
                "noise": (small_square - big_square) / (1 / small - 1 / big),
                "signal": (big * big_square - small * small_square) / (big - small),
                "b_small": small,
                "b_big": big,
            },
            index=steps.index,
        )
    usable: NDArray[np.bool_] = np.isfinite(samples.to_numpy()).all(axis=1)
    return samples.loc[usable]


def estimate(steps: pd.DataFrame) -> float | None:
    """Return the gradient noise scale tr(S)/|G|^2, in samples.

    Numerator and denominator are averaged apart, over all sampled steps: the mean of the ratios of
    single steps would be biased, and need not exist.

    Parameters
    ----------
    steps : DataFrame
        Rows of one run, with the columns in `NOISE_COLUMNS`.

    Returns
    -------
    float or None
        None where no step was sampled, or where one of the two means is not above zero.
    """
    samples = noise_samples(steps)
    if samples.empty:
        return None
    noise, signal = float(samples["noise"].mean()), float(samples["signal"].mean())
    return noise / signal if noise > 0 and signal > 0 else None
