from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests  # type: ignore[import-untyped]

from batchscape.analysis import find_cells, load
from batchscape.analysis.best import SIGNIFICANCE, mark_best, p_of_best
from batchscape.record.figures import COMPARED, FIGURES

CUTS = {8: (1, 8, 1), 16: (1, 16, 1), 32: (1, 32, 1)}


def marks_of(*sweeps: Any) -> pd.DataFrame:
    """Marks by cell, with the geometry."""
    cells = find_cells(load(*[sweep.path for sweep in sweeps]).runs)
    marks = mark_best(cells)
    return marks.join(cells.table[["global_batch_size", "micro_batch_size"]])


def train(sweep: Any, losses: dict[int, list[float]], **settings: Any) -> Any:
    """Write runs of the same number of samples, with flat losses by batch and seed."""
    for batch, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            steps = 320 // batch
            sweep.run(
                CUTS[batch],
                seed=seed,
                optimizer_steps=steps,
                loss=lambda step, level=loss: np.full(len(step), level),
                **settings,
            )
    return sweep


CLEAR = {8: [1.00, 1.10, 1.20, 1.31], 16: [1.30, 1.41, 1.50, 1.60], 32: [1.5, 1.60, 1.71, 1.8]}


CLOSE = {8: [1.00, 1.10, 1.20, 1.30], 16: [1.30, 1.05, 1.50, 1.20], 32: [1.5, 1.60, 1.71, 1.8]}


@pytest.mark.slow
def test_the_p_value_is_that_of_the_hardest_rival():
    rng = np.random.default_rng(0)
    values = rng.normal([0, 1, 2], 0.5, (6, 3)) + rng.normal(size=(6, 1))
    expected = [stats.ttest_rel(values[:, 0], values[:, other]).pvalue for other in (1, 2)]
    assert p_of_best(values, 0) == pytest.approx(max(expected))
    assert p_of_best(values, 1) == 1.0
    values[:5, 2] = np.nan
    assert np.isnan(p_of_best(values, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("candidates", "tied"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("seeds", [3, 5])
def test_a_tie_is_seldom_called_a_win(candidates, tied, seeds):
    """Choosing the best by its mean first does not raise the error above its level."""
    rng = np.random.default_rng(1)
    means = np.where(np.arange(candidates) < tied, 0.0, 30.0)
    sweeps = rng.normal(means, 1.0, (1000, seeds, candidates)) + rng.normal(size=(1000, seeds, 1))
    wrong = sum(p_of_best(v, int(v.mean(axis=0).argmin())) < 0.05 for v in sweeps)
    assert wrong / 1000 < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)
    if tied == 2:
        assert wrong / 1000 > 0.03


@pytest.mark.slow
def test_a_clear_best_is_marked_and_a_close_one_is_not(build):
    clear = marks_of(train(build("clear"), CLEAR))
    assert clear.loc[clear["final_loss_best"], "global_batch_size"].tolist() == [8]
    close = marks_of(train(build("close"), CLOSE))
    assert not close["final_loss_best"].any()
    assert close["final_loss_best_p"].count() == 1


def test_p_values_are_adjusted_together(build):
    """By Holm's method, over all figures: a best that stands out alone is no best among many."""
    sweep = train(build(), {8: [1.00, 1.10, 1.20], 16: [1.30, 1.60, 1.50]})
    cells = find_cells(load(sweep.path).runs)
    figures = cells.figures
    marks = mark_best(cells)
    raw = {}
    for name in COMPARED:
        if marks[f"{name}_best_p"].isna().all():
            continue
        by_seed = (
            figures[name]
            .astype(float)
            .groupby([cells.runs["seed"], cells.runs["global_batch_size"]])
        )
        wide = by_seed.mean().unstack()
        best, other = (wide[8], wide[16])
        if (best.mean() > other.mean()) == (FIGURES[name].better == "lower"):
            best, other = other, best
        constant = (best - other).nunique() == 1
        raw[name] = 0.0 if constant else stats.ttest_rel(best, other).pvalue
    assert marks["best_comparisons"].eq(len(raw)).all()
    assert len(raw) > 2
    adjusted = dict(zip(raw, multipletests(list(raw.values()), method="holm")[1], strict=True))
    for name, p in adjusted.items():
        assert marks[f"{name}_best_p"].dropna().item() == pytest.approx(p, abs=1e-12), name
        assert marks[f"{name}_best"].any() == (p < SIGNIFICANCE), name
    # The correction decides here: alone it would be called the best.
    assert raw["final_loss"] < SIGNIFICANCE < adjusted["final_loss"]


@pytest.mark.slow
def test_decompositions_of_one_batch_are_one_candidate_for_a_loss(build):
    """They differ by rounding, always in the same direction: that is no better training."""
    sweep = build()
    for seed in range(5):
        for geometry in ((1, 32, 1), (1, 8, 4)):
            sweep.run(geometry, seed=seed)
    assert marks_of(sweep)["final_loss_best_p"].isna().all()
    other = build("two")
    train(other, CLEAR)
    for seed, loss in enumerate(CLEAR[8]):
        level = {"loss": lambda step, level=loss: np.full(len(step), level)}
        other.run((1, 4, 2), seed=seed, optimizer_steps=40, rounding=0.0, **level)
    marks = marks_of(other)
    best = marks[marks["final_loss_best"]]
    assert best["global_batch_size"].tolist() == [8, 8]
    assert sorted(best["micro_batch_size"]) == [4, 8]


@pytest.mark.slow
def test_losses_after_unequal_samples_are_not_compared(build):
    sweep = build()
    for seed in range(4):
        sweep.run((1, 8, 1), seed=seed)
        sweep.run((1, 32, 1), seed=seed)
    assert marks_of(sweep)["final_loss_best_p"].isna().all()


@pytest.mark.slow
def test_step_times_of_unequal_global_batches_are_not_compared(build):
    sweep = train(build(), CLEAR)
    marks = marks_of(sweep)
    assert marks["step_time_s_best_p"].isna().all()
    assert marks["tokens_per_s_best_p"].count() == 1
    for seed in range(4):
        sweep.run((1, 8, 4), seed=seed, optimizer_steps=10)
    assert marks_of(sweep)["step_time_s_best_p"].count() == 1


@pytest.mark.slow
def test_the_least_memory_without_spread_is_best_and_a_tie_is_not(build):
    sweep = train(build(), CLEAR)
    marks = marks_of(sweep)
    assert marks.loc[marks["peak_allocated_gib_best"], "global_batch_size"].tolist() == [8]
    assert marks["peak_allocated_gib_best_p"].min() == 0
    for seed in range(4):
        sweep.run((2, 8, 1), seed=seed, optimizer_steps=20)
    tied = marks_of(sweep)
    assert not tied["peak_allocated_gib_best"].any()


@pytest.mark.slow
def test_hardware_and_settings_are_never_mixed(build):
    here, there = train(build("here"), CLEAR), build("there")
    train(there, {8: [0.1] * 4}, hardware="Accelerator", device_type="cuda")
    train(there, {8: [0.2] * 4}, optimizer__learning_rate=0.5)
    marks = marks_of(here, there)
    best = marks[marks["final_loss_best"]]
    assert best["global_batch_size"].tolist() == [8]
    assert marks["final_loss_best_p"].count() == 1


@pytest.mark.slow
def test_survivors_are_never_best(build):
    sweep = train(build(), CLEAR)
    sweep.run(CUTS[8], seed=9, status="diverged", reason="the loss is NaN", done=9)
    marks = marks_of(sweep)
    assert not marks["final_loss_best"].any()
    assert not marks["peak_allocated_gib_best"].any()
    assert marks["final_loss_best_p"].count() == 1


@pytest.mark.slow
def test_runs_cut_at_a_target_have_no_final_loss_to_compare(build):
    sweep = train(build(), CLEAR, stop_reason="target")
    assert marks_of(sweep)["final_loss_best_p"].isna().all()


@pytest.mark.slow
def test_one_seed_tells_nothing(build):
    marks = marks_of(train(build(), {batch: by_seed[:1] for batch, by_seed in CLEAR.items()}))
    assert marks["best_comparisons"].eq(0).all()
    assert not marks.filter(regex="_best$").any(axis=None)
