from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis import find_cells, load
from batchscape.analysis.best import compare_with_best, is_worse, mark_best
from batchscape.record.figures import COMPARED, FIGURES

CUTS = {8: (1, 8, 1), 16: (1, 16, 1), 32: (1, 32, 1)}


def marks_of(*sweeps: Any) -> pd.DataFrame:
    """Marks by cell, with the geometry."""
    cells = find_cells(load(*[sweep.path for sweep in sweeps]).runs)
    marks, _ = mark_best(cells)
    return marks.join(cells.table[["global_batch_size", "micro_batch_size"]])


def contests_of(*sweeps: Any) -> pd.Series[int]:
    """Number of contests by figure."""
    return mark_best(find_cells(load(*[sweep.path for sweep in sweeps]).runs))[1]


def table_of(values: np.ndarray) -> pd.DataFrame:
    """Rows of contests, from values of shape (contests, pairs, candidates)."""
    contest, pair, candidate = (numbers.ravel() for numbers in np.indices(values.shape))
    columns = {"contest": contest, "candidate": candidate, "pair": pair, "value": values.ravel()}
    return pd.DataFrame(columns)


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


def test_intervals_are_those_of_paired_differences():
    rng = np.random.default_rng(0)
    values = rng.normal([0, 1, 2], 0.5, (6, 3)) + rng.normal(size=(6, 1))
    values[:2, 2] = np.nan
    differences = compare_with_best(table_of(values[None]))
    assert differences["best"].tolist() == [0, 0]
    assert differences["n"].tolist() == [6, 4]
    for contests in (1, 3, 40, 1000):
        expected = []
        for other in (1, 2):
            apart = (values[:, other] - values[:, 0])[np.isfinite(values[:, other])]
            error = apart.std(ddof=1) / np.sqrt(len(apart))
            low, _ = stats.t.interval(1 - 0.05 / contests, len(apart) - 1, apart.mean(), error)
            expected.append(low > 0)
        assert is_worse(differences, contests).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("candidates", "tied"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("seeds", [3, 5])
def test_a_tie_is_seldom_called_a_win(candidates, tied, seeds):
    """Choosing the best by its mean first does not raise the error above its level."""
    rng = np.random.default_rng(1)
    means = np.where(np.arange(candidates) < tied, 0.0, 30.0)
    sweeps = rng.normal(means, 1.0, (1000, seeds, candidates)) + rng.normal(size=(1000, seeds, 1))
    differences = compare_with_best(table_of(sweeps))
    wrong = is_worse(differences, 1).groupby(differences["contest"]).all().mean()
    assert wrong < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)
    if tied == 2:
        assert wrong > 0.03


@pytest.mark.slow
def test_a_clear_best_is_marked_and_a_close_one_is_not(build):
    clear = marks_of(train(build("clear"), CLEAR))
    assert clear.loc[clear["final_loss"], "global_batch_size"].tolist() == [8]
    close = train(build("close"), CLOSE)
    assert not marks_of(close)["final_loss"].any()
    assert contests_of(close)["final_loss"] == 1


def test_intervals_hold_for_all_figures_together(build):
    """A best that stands out alone is no best among many."""
    sweep = train(build(), {8: [1.00, 1.10, 1.20], 16: [1.30, 1.60, 1.50]})
    cells = find_cells(load(sweep.path).runs)
    marks, contests = mark_best(cells)
    raw = {}
    for name in COMPARED:
        by_seed = (
            cells.figures[name]
            .astype(float)
            .groupby([cells.runs["seed"], cells.runs["global_batch_size"]])
        )
        wide = by_seed.mean().unstack()
        if wide.isna().any(axis=None) or FIGURES[name].better is None:
            continue
        best, other = (wide[8], wide[16])
        if (best.mean() > other.mean()) == (FIGURES[name].better == "lower"):
            best, other = other, best
        constant = (best - other).nunique() == 1
        raw[name] = 0.0 if constant else stats.ttest_rel(best, other).pvalue
    # Step times of two batches are not compared, and samples a second are as tokens a second.
    raw = {name: p for name, p in raw.items() if name not in {"step_time_s", "samples_per_s"}}
    assert contests[contests > 0].index.tolist() == list(raw)
    assert contests.sum() == len(raw) > 2
    for name, p in raw.items():
        assert marks[name].any() == (p < 0.05 / len(raw)), name
    # The correction decides here: alone it would be called the best.
    assert 0.05 / len(raw) < raw["final_loss"] < 0.05


@pytest.mark.slow
def test_decompositions_of_one_batch_are_one_candidate_for_a_loss(build):
    """They differ by rounding, always in the same direction: that is no better training."""
    sweep = build()
    for seed in range(5):
        for geometry in ((1, 32, 1), (1, 8, 4)):
            sweep.run(geometry, seed=seed)
    assert contests_of(sweep)["final_loss"] == 0
    other = build("two")
    train(other, CLEAR)
    for seed, loss in enumerate(CLEAR[8]):
        level = {"loss": lambda step, level=loss: np.full(len(step), level)}
        other.run((1, 4, 2), seed=seed, optimizer_steps=40, rounding=0.0, **level)
    marks = marks_of(other)
    best = marks[marks["final_loss"]]
    assert best["global_batch_size"].tolist() == [8, 8]
    assert sorted(best["micro_batch_size"]) == [4, 8]


@pytest.mark.slow
def test_losses_after_unequal_samples_are_not_compared(build):
    sweep = build()
    for seed in range(4):
        sweep.run((1, 8, 1), seed=seed)
        sweep.run((1, 32, 1), seed=seed)
    assert contests_of(sweep)["final_loss"] == 0


@pytest.mark.slow
def test_step_times_of_unequal_global_batches_are_not_compared(build):
    sweep = train(build(), CLEAR)
    contests = contests_of(sweep)
    assert (contests["step_time_s"], contests["tokens_per_s"]) == (0, 1)
    for seed in range(4):
        sweep.run((1, 8, 4), seed=seed, optimizer_steps=10)
    assert contests_of(sweep)["step_time_s"] == 1


@pytest.mark.slow
def test_the_least_memory_without_spread_is_best_and_a_tie_is_not(build):
    sweep = train(build(), CLEAR)
    marks = marks_of(sweep)
    assert marks.loc[marks["peak_allocated_gib"], "global_batch_size"].tolist() == [8]
    for seed in range(4):
        sweep.run((2, 8, 1), seed=seed, optimizer_steps=20)
    tied = marks_of(sweep)
    assert not tied["peak_allocated_gib"].any()


@pytest.mark.slow
def test_hardware_and_settings_are_never_mixed(build):
    here, there = train(build("here"), CLEAR), build("there")
    train(there, {8: [0.1] * 4}, hardware="Accelerator", device_type="cuda")
    train(there, {8: [0.2] * 4}, optimizer__learning_rate=0.5)
    marks = marks_of(here, there)
    best = marks[marks["final_loss"]]
    assert best["global_batch_size"].tolist() == [8]
    assert contests_of(here, there)["final_loss"] == 1


@pytest.mark.slow
def test_survivors_are_never_best(build):
    sweep = train(build(), CLEAR)
    sweep.run(CUTS[8], seed=9, status="diverged", reason="the loss is NaN", done=9)
    marks = marks_of(sweep)
    assert not marks["final_loss"].any()
    assert not marks["peak_allocated_gib"].any()
    assert contests_of(sweep)["final_loss"] == 1


@pytest.mark.slow
def test_runs_cut_at_a_target_have_no_final_loss_to_compare(build):
    sweep = train(build(), CLEAR, stop_reason="target")
    assert contests_of(sweep)["final_loss"] == 0


@pytest.mark.slow
def test_one_seed_tells_nothing(build):
    sweep = train(build(), {batch: by_seed[:1] for batch, by_seed in CLEAR.items()})
    assert contests_of(sweep).eq(0).all()
    assert not marks_of(sweep)[[*COMPARED]].any(axis=None)
