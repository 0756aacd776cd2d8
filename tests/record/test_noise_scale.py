"""The two unknowns from two norms, against closed forms."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.record.figures import COLUMNS
from batchscape.record.noise_scale import NOISE_COLUMNS, estimate, noise_samples


def rows(**columns):
    """Steps with the types of the record; what is not given is missing."""
    typed = {name: COLUMNS["steps"][name].dtype for name in NOISE_COLUMNS}
    return pd.DataFrame(columns).reindex(columns=list(NOISE_COLUMNS)).astype(typed)


def expected_rows(noise, signal, small, big):
    """Steps whose squares are exactly what they are on average."""
    noise, signal, small, big = np.broadcast_arrays(noise, signal, small, big)
    return rows(
        global_batch_size=big,
        gradient_norm=np.sqrt(signal + noise / big),
        small_batch_size=small,
        small_gradient_square=signal + noise / small,
    )


@given(
    st.floats(1e-6, 1e6),
    st.floats(1e-6, 1e6),
    st.integers(1, 64),
    st.integers(2, 64),
)
def test_expected_squares_give_back_what_they_came_from(noise, signal, small, parts):
    steps = expected_rows([noise], [signal], small, small * parts)
    sample = noise_samples(steps).iloc[0]
    # The difference of two squares loses the digits that they share.
    scale = signal + noise / small
    assert sample["noise"] == pytest.approx(noise, abs=1e-12 * scale * small * parts)
    assert sample["signal"] == pytest.approx(signal, abs=1e-12 * scale * parts)
    assert (sample["b_small"], sample["b_big"]) == (small, small * parts)


def test_estimates_are_unbiased_at_every_pair_of_sizes():
    """Drawn gradients, of which the formula knows only the norms."""
    rng = np.random.default_rng(0)
    gradient, deviations = rng.normal(size=6), rng.uniform(0.5, 3, size=6)
    for small, parts in ((1, 2), (3, 4), (8, 2)):
        noise = rng.normal(size=(20_000, parts, 6)) * deviations / np.sqrt(small)
        means = gradient + noise
        steps = rows(
            global_batch_size=np.full(20_000, small * parts),
            gradient_norm=np.linalg.norm(means.mean(axis=1), axis=-1),
            small_batch_size=np.full(20_000, small),
            small_gradient_square=(means**2).sum(axis=-1).mean(axis=1),
        )
        samples = noise_samples(steps)
        for name, truth in (("noise", (deviations**2).sum()), ("signal", (gradient**2).sum())):
            assert abs(samples[name].mean() - truth) < 4 * samples[name].sem(), (small, name)


def test_sizes_may_change_between_rows():
    steps = expected_rows(60.0, 2.0, [4, 4, 8, 2], [8, 16, 32, 6])
    assert noise_samples(steps)["noise"].to_numpy() == pytest.approx([60.0] * 4)
    assert estimate(steps) == pytest.approx(30.0)


def test_means_are_divided_and_not_ratios_averaged():
    steps = expected_rows([10.0, 30.0], [1.0, 9.0], 2, 8)
    assert estimate(steps) == pytest.approx(40 / 10)
    assert estimate(steps) != pytest.approx((10 / 1 + 30 / 9) / 2)


def test_rows_without_a_sample_and_rows_that_overflowed_count_for_nothing():
    good = expected_rows([10.0, 30.0], [1.0, 9.0], 2, 8)
    plain = rows(global_batch_size=[8], gradient_norm=[1.0])
    overflowed = rows(
        global_batch_size=[8, 8, 8],
        gradient_norm=[float("inf"), 1.0, 1e200],
        small_batch_size=[2, 2, 2],
        small_gradient_square=[1.0, None, 1.0],
    )
    steps = pd.concat([plain, good, overflowed], ignore_index=True)
    assert noise_samples(steps).index.tolist() == [1, 2]
    assert estimate(steps) == estimate(good)


@pytest.mark.parametrize(
    "steps",
    [
        rows(),
        rows(global_batch_size=[8], gradient_norm=[1.0]),
        # The large batch has the larger gradient: no noise is left.
        rows(
            global_batch_size=[8],
            gradient_norm=[2.0],
            small_batch_size=[4],
            small_gradient_square=[3.0],
        ),
        # All of the gradient is noise: no signal is left.
        rows(
            global_batch_size=[8],
            gradient_norm=[1.0],
            small_batch_size=[4],
            small_gradient_square=[2.5],
        ),
    ],
    ids=["empty", "not sampled", "noise below zero", "signal below zero"],
)
def test_what_cannot_be_estimated_is_missing(steps):
    assert estimate(steps) is None
