"""Fits of published measurements give the published numbers."""

import math

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.tradeoff.fit import fit_tradeoff
from batchscape.analysis.tradeoff.topic import noise_scale_sentence

# Steps to a target loss at batch sizes of 64 to 16384 sequences: Zhang et al. 2024,
# arXiv:2410.21676; github.com/hlzhang109/critical-batch-size at c5b509d (MIT), the lists that
# plots/chinchilla.ipynb fits. Sizes are parameters in millions.
BATCHES = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
STEPS = {
    85: [46000, 23000, 13282, 7000, 3840, 2528, 1917, 1600, 1600],
    151: [96000, 49000, 24000, 12000, 7128, 4350, 2940, 2400, 2300],
    302: [196000, 90000, 46000, 23400, 13300, 7224, 4980, 3400, 2879],
    604: [311000, 166000, 81000, 37440, 21320, 11400, 7199, 4700, 3800],
    1200: [642000, 331000, 176000, 94000, 46500, 25000, 15360, 8900, 6500],
}
OVERHEAD20 = [745.3, 955.2, 1393.7, 1888.5, 2533.4]
RATIOS = [2191, 3240, 5433, 7907, 11131]

# Critical batch and simple noise scale, averages over training: McCandlish et al. 2018,
# arXiv:1812.06162, table 1.
NOISE_SCALES = {
    "MNIST": (200, 900),
    "SVHN": (500, 4000),
    "CIFAR10": (900, 2000),
    "ImageNet": (15000, 30000),
    "Autoencoder (SVHN)": (40, 2),
    "VAE (SVHN)": (200, 10),
    "Billion Word": (100000, 150000),
    "Dota 1v1": (3000000, 300000),
}


def fits(form="two_term", **settings):
    tables = {
        size: pd.DataFrame({"global_batch_size": BATCHES, "seed": 0, "steps_to_target": steps})
        for size, steps in STEPS.items()
    }
    return {size: fit_tradeoff(table, form=form, **settings) for size, table in tables.items()}


def test_critical_batch_sizes_of_zhang_et_al():
    fits_by_size = fits(reference_batch_size=256)
    values = [fit.overhead_batch_size.value for fit in fits_by_size.values()]
    assert values == pytest.approx(OVERHEAD20, abs=0.05001)
    ratios = [fit.critical_batch_size.value for fit in fits_by_size.values()]
    assert ratios == pytest.approx(RATIOS, rel=1e-3)


def test_free_exponents_are_near_one():
    exponents = [fit.exponent.value for fit in fits(form="free_exponent").values()]
    assert [round(value, 2) for value in exponents] == [1.03, 1.07, 1.04, 1.04, 0.97]


def test_one_seed_gives_no_interval_and_says_so():
    for fit in fits().values():
        assert math.isnan(fit.critical_batch_size.low)
        assert "1 seed" in fit.critical_batch_size.note
        assert any("1 seed" in text for text in fit.warnings)


def test_dropping_large_batches_moves_the_critical_batch():
    changes = []
    for size, steps in STEPS.items():
        table = pd.DataFrame({"global_batch_size": BATCHES, "seed": 0, "steps_to_target": steps})
        parts = [
            fit_tradeoff(part, form="two_term").parameters[1]
            for part in (table, table[table["global_batch_size"] <= 4096])
        ]
        changes.append(parts[1] / parts[0] - 1)
        assert size in STEPS
    assert (min(changes), max(changes)) == pytest.approx((-0.21, 0.22), abs=0.01)


def test_noise_scale_is_compared_by_its_ratio():
    critical, noise = np.array(list(NOISE_SCALES.values())).T
    assert np.exp(np.log(noise / critical).mean()) == pytest.approx(0.70, abs=0.005)
    assert (noise / critical).min() == 0.05
    assert (noise / critical).max() == 8
    fit = fits()[85]
    sentence = noise_scale_sentence(fit.critical_batch_size, 219.06, 1, len(BATCHES))
    assert "0.10 times" in sentence
