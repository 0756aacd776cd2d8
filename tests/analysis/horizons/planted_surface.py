"""Sweeps whose final loss is a known surface over log batch and log rate, at several horizons."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd

from batchscape.analysis.horizons.optima import NAMES

BATCH, RATE = NAMES

HORIZONS = (1024, 2048, 4096, 8192)
BATCHES = (2, 4, 8, 16, 32)
RATES = (0.004, 0.008, 0.016, 0.032, 0.064)
EXPONENTS = {BATCH: 0.383, RATE: 0.3}
MIDDLE = {BATCH: 8.0, RATE: 0.008}
CURVATURE = ((0.2, 0.1), (0.1, 0.8))
"""Of log batch and log rate."""


def optimum(name, horizon):
    return MIDDLE[name] * (horizon / math.sqrt(HORIZONS[0] * HORIZONS[-1])) ** EXPONENTS[name]


def sweep(*, seeds=4, sd=0.0, together=0.0, horizons=HORIZONS, curvature=CURVATURE, shape=None,
          rng=None):  # fmt: skip
    """Runs whose log loss is a quadratic form; their rates follow the root of the batch.

    `together` is the share of the noise's variance that horizons of one trunk have in common.
    """
    rng = rng or np.random.default_rng(0)
    places = [(b, r * math.sqrt(b / 32)) for b, r in itertools.product(BATCHES, RATES)]
    rows = []
    for seed in range(seeds):
        shared = rng.standard_normal(len(places))
        for horizon in horizons:
            noise = math.sqrt(1 - together) * rng.standard_normal(len(places))
            noise += math.sqrt(together) * shared
            for (batch, rate), own in zip(places, noise, strict=True):
                x = np.log([batch / optimum(BATCH, horizon), rate / optimum(RATE, horizon)])
                bowl = x @ np.array(curvature) @ x / 2 if shape is None else shape(*x)
                loss = math.exp(bowl + sd * own + 0.1 * seed) / math.sqrt(horizon)
                rows.append((horizon, batch, rate, str(seed), loss))
    return pd.DataFrame(rows, columns=["horizon", BATCH, RATE, "seed", "cost"])
