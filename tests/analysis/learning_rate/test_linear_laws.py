"""Laws on the linear scale against scipy's fits, and the noise batch's interval by coverage."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

from batchscape.analysis import linear_laws, noise_batch
from batchscape.analysis.learning_rate.exponent import exponent_of
from batchscape.errors import AnalysisError

BATCHES = np.array([16.0, 32, 64, 128, 256, 512, 1024])


def optima(noise: float = 0.0, seed: int = 0, scale: float = 128.0) -> pd.DataFrame:
    away = noise * np.random.default_rng(seed).normal(size=len(BATCHES))
    rate = 0.1 / (1 + scale / BATCHES) * np.exp(away)
    return pd.DataFrame({"global_batch_size": BATCHES, "learning_rate": rate})


def saturating(batch: np.ndarray, top: float, noise: float) -> np.ndarray:
    return top / (1 + noise / batch)


def test_fits_are_those_of_scipy() -> None:
    best = optima(0.1)
    found = linear_laws(best).set_index("law")
    rate = best["learning_rate"].to_numpy()
    (top, noise), _ = optimize.curve_fit(saturating, BATCHES, rate, (0.1, 100.0))
    assert found.loc["saturating", "coefficient"] == pytest.approx(top, rel=1e-5)
    assert found.loc["saturating", "noise_scale"] == pytest.approx(noise, rel=1e-5)
    (factor, power), _ = optimize.curve_fit(lambda b, c, e: c * b**e, BATCHES, rate, (0.01, 0.5))
    assert found.loc["power", ["coefficient", "exponent"]].tolist() == pytest.approx(
        [factor, power], rel=1e-4
    )
    slope = float(BATCHES @ rate / (BATCHES @ BATCHES))
    assert found.loc["linear", "coefficient"] == pytest.approx(slope)
    rms = math.sqrt(((rate - slope * BATCHES) ** 2).mean())
    assert found.loc["linear", "rms"] == pytest.approx(rms)
    # Of as many parameters criteria differ by the misfit alone: n log of the ratio of squares.
    ratio = 2 * math.log(found.loc["linear", "rms"] / found.loc["fixed", "rms"])
    apart = found.loc["linear", "aicc"] - found.loc["fixed", "aicc"]
    assert apart == pytest.approx(len(BATCHES) * ratio)
    assert found["delta_aicc"].min() == 0


@pytest.mark.parametrize("scale", ["log", "linear"])
def test_at_its_ends_the_misfit_is_what_f_allows(scale: str) -> None:
    best = optima(0.1)
    found = noise_batch(best, scale=scale)
    rate = best["learning_rate"].to_numpy()

    def misfit(noise: float) -> float:
        curve = saturating(BATCHES, 1.0, noise)
        if scale == "log":
            return float(np.log(rate / curve).var() * len(rate))
        return float(np.linalg.lstsq(curve[:, None], rate, rcond=None)[1][0])

    least = misfit(found.value)
    for end in (found.low, found.high):
        p = stats.f.sf((misfit(end) / least - 1) * 5, 1, 5)
        assert p == pytest.approx(0.05, rel=1e-3)
    assert found.low < found.value < found.high


@pytest.mark.slow
def test_the_interval_holds_the_noise_batch_as_often_as_it_says() -> None:
    held = []
    for seed in range(150):
        found = noise_batch(optima(0.15, seed))
        held.append(found.low <= 128.0 <= found.high)
    assert 0.89 <= np.mean(held) <= 0.99


def test_a_noise_batch_that_no_batch_reaches_has_no_end() -> None:
    far = noise_batch(optima(0.05, scale=1e6))
    assert not far.is_identified
    assert math.isinf(far.high)
    assert far.low > 1000
    near = noise_batch(optima(0.05, scale=1e-3))
    assert (near.is_identified, near.low) == (False, 0.0)
    exact = noise_batch(optima())
    assert (exact.low, exact.value, exact.high) == pytest.approx((128, 128, 128), rel=1e-3)


def test_what_has_no_noise_batch_is_said() -> None:
    assert "2 global batches" in (noise_batch(optima().head(2)).note or "")
    assert linear_laws(optima().head(1))["coefficient"].isna().all()
    with pytest.raises(AnalysisError, match="saturating and surge"):
        noise_batch(optima(), "linear")
    with pytest.raises(AnalysisError, match=r"missing: \['learning_rate'"):
        linear_laws(optima()[["global_batch_size"]])


def test_optima_of_too_few_seeds_give_no_interval() -> None:
    best = optima(0.1).assign(low=math.nan, high=math.nan)
    found, bounded = noise_batch(best), noise_batch(optima(0.1))
    assert found.value == bounded.value
    assert (math.isnan(found.low), math.isnan(found.high), found.method) == (True, True, "none")
    assert "fewer than three seeds" in (found.note or "")
    assert exponent_of(best).note == found.note
    assert linear_laws(best)["delta_aicc"].isna().all()


def test_an_open_interval_is_a_bound() -> None:
    found = noise_batch(optima(0.2, scale=2000.0))
    assert (found.is_identified, found.high) == (False, math.inf)
    assert "the batches leave it open, at least" in (found.note or "")
    assert found.text(2).startswith("not identified (≥ ")
    below = noise_batch(optima(0.2, 1, scale=8.0))
    assert (below.is_identified, below.low) == (False, 0.0)
    assert "the batches leave it open, at most" in (below.note or "")


def test_a_law_outside_the_exponents_interval_is_not_compared() -> None:
    """Optima of a slope near 0.3, which no law of one parameter has."""
    rate = 0.01 * BATCHES**0.3 * np.exp(0.03 * np.random.default_rng(2).normal(size=7))
    best = pd.DataFrame({"global_batch_size": BATCHES, "learning_rate": rate})
    table, exponent = linear_laws(best).set_index("law"), exponent_of(best)
    slope = np.polyfit(np.log(BATCHES), np.log(rate), 1)[0]
    assert exponent.low < slope < exponent.high < 0.5
    assert table.loc[["fixed", "sqrt", "linear"], "delta_aicc"].isna().all()
    assert table.loc["sqrt", "slope"] == pytest.approx(0.5)
    inside = table["slope"].between(exponent.low, exponent.high)
    assert table["delta_aicc"].notna().eq(inside & table["aicc"].notna()).all()
    assert table["delta_aicc"].min() == 0
