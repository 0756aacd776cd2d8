"""The ratio between the ends of the range covers that of curves without noise."""

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.tradeoff.measurements import Measurements, ends_of_range

CRITICAL, SWEEPS = 80.0, 300
TRUTH = 16 * (1 + 8 / CRITICAL) / (1 + 128 / CRITICAL)


def crossings(samples, losses, target):
    """First crossings and those for good, between measurements, and which runs end below."""
    met, n = losses <= target, losses.shape[-1]
    steps = []
    for place in (met.argmax(-1), n - (~met[..., ::-1]).argmax(-1)):
        upper = np.clip(place, 1, n - 1)[..., None]
        after = np.take_along_axis(losses, upper, -1)[..., 0]
        before = np.take_along_axis(losses, upper - 1, -1)[..., 0]
        share = np.clip((before - target) / (before - after), 0, 1)
        low, high = samples[upper[..., 0] - 1], samples[upper[..., 0]]
        steps.append(low + share * (high - low))
    return (*steps, met[..., -1])


@pytest.mark.parametrize("noise", [0.1, 0.3])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_ratio_covers_the_noiseless_one(seeds, noise):
    rng, samples = np.random.default_rng(20), np.arange(0, 7681, 256.0)
    shape = (SWEEPS, 2, seeds, len(samples))
    errors = rng.standard_normal(shape)
    for i in range(1, len(samples)):
        errors[..., i] = 0.5 * errors[..., i - 1] + np.sqrt(0.75) * errors[..., i]
    sizes = np.array([8.0, 128.0])
    speed = np.exp(0.05 * rng.standard_normal(shape[:3]))[..., None]
    speed = speed / (1 + sizes[:, None, None] / CRITICAL)
    losses = (0.1 + 2.2 * (1 + samples * speed / 300) ** -1.3) * np.exp(noise * errors)
    first, good, reached = crossings(samples, losses, 0.6)
    all_reached = reached.all((1, 2))
    log_first, log_good = (np.log(x[all_reached] / sizes[:, None]) for x in (first, good))
    nothing = pd.DataFrame()
    covered = []
    for steps, first_steps in zip(log_good, log_first, strict=True):
        measurements = Measurements(sizes, steps, nothing, first_steps, nothing, ())
        ratios = ends_of_range(measurements, (8.0, 128.0))
        assert ratios is not None
        assert ratios[0].value * ratios[1].value == pytest.approx(16)
        covered.append(ratios[0].low <= TRUTH <= ratios[0].high)
    assert np.mean(covered) >= 0.90
