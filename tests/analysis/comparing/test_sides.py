"""Sweep folders side by side: what tells them apart, ratios of pairs, and nothing pooled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis.cells import Cells, find_cells
from batchscape.analysis.comparing.sides import compare_sweeps, find_axis
from batchscape.analysis.comparing.topic import comparing_section
from batchscape.record.tables import load

CUTS = [(1, 32, 1), (1, 8, 4)]


def two_machines(build: Callable[..., Any], factor: float = 2.0) -> Cells:
    return find_cells(runs_of_two_machines(build, factor))


def runs_of_two_machines(build: Callable[..., Any], factor: float = 2.0) -> pd.DataFrame:
    """The same sweep in two folders, the second on another machine whose steps take longer."""
    # Runs with equal rows would be copies of one run.
    for folder, hardware, wait in (("one", "Slow CPU", 0.0), ("two", "Fast CPU", 0.001)):
        sweep = build(folder)
        for seed in (0, 1, 2):
            for cut in CUTS:
                sweep.run(cut, seed=seed, hardware=hardware, core_wait=wait)
    sides = [build(folder).path for folder in ("one", "two")]
    runs = load(*sides).runs
    slow = runs["launch.device_model"].eq("Slow CPU")
    rng = np.random.default_rng(0)
    noise = 1 + 0.01 * rng.normal(size=len(runs))
    return runs.assign(
        step_time_s=np.where(slow, 0.1, 0.1 * factor) * noise,
        peak_allocated_gib=np.where(slow, 1.0, 1.5),
    )


@pytest.mark.slow
def test_machines_are_told_apart_and_paired(build):
    cells = two_machines(build)
    sides = compare_sweeps(cells)
    assert sides.axis == ("hardware",)
    assert sides.names == ("hardware Slow CPU, 2 cores", "hardware Fast CPU, 2 cores")
    times = sides.table[sides.table["quantity"].eq("step_time_s")]
    assert len(times) == len(CUTS)
    for row in times.itertuples():
        cut_runs = cells.runs[cells.runs["gradient_accumulation_steps"].eq(row[3])]
        wide = cut_runs.pivot(index="seed", columns="hardware", values="step_time_s").astype(float)
        logs = np.log(wide["Fast CPU, 2 cores"] / wide["Slow CPU, 2 cores"])
        interval = stats.ttest_1samp(logs, 0).confidence_interval()
        assert row.effect == pytest.approx(np.exp(logs.mean()))
        assert (row.low, row.high) == pytest.approx((np.exp(interval.low), np.exp(interval.high)))
        assert (row.n, row.kind) == (3, "ratio")
        assert len(str(row.run_ids).split(";")) == 6
    memory = sides.table[sides.table["quantity"].eq("peak_allocated_gib")]
    assert memory["effect"].to_numpy(dtype=float) == pytest.approx([1.5, 1.5])
    loss = sides.table[sides.table["quantity"].eq("final_eval_loss")]
    assert set(loss["kind"]) == {"difference"}
    assert loss["effect"].to_numpy(dtype=float) == pytest.approx([0, 0], abs=1e-12)


def test_times_are_paired_by_seed_and_repeat_and_losses_by_seed(build):
    """A repeat is measured again, and trains the same: six pairs of a time, three of a loss."""
    for folder, hardware, wait in (("one", "Slow CPU", 0.0), ("two", "Fast CPU", 0.001)):
        sweep = build(folder)
        for seed in (0, 1, 2):
            for repeat in (0, 1):
                more = {"seed": seed, "timing_repeat": repeat, "core_wait": wait}
                sweep.run((1, 8, 1), hardware=hardware, **more)
    runs = load(build("one").path, build("two").path).runs
    # A repeat's own slowness is on both sides, and cancels in its pair alone.
    slow = np.where(runs["timing_repeat"].eq(1), 3.0, 1.0) + 0.1 * runs["seed"].astype(float)
    noise = 1 + 0.01 * np.random.default_rng(0).normal(size=len(runs))
    cells = find_cells(runs.assign(step_time_s=slow * noise))
    sides = compare_sweeps(cells)
    table = sides.table.set_index("quantity")
    wide = cells.runs.pivot(
        index=["seed", "timing_repeat"], columns="hardware", values="step_time_s"
    ).astype(float)
    logs = np.log(wide["Fast CPU, 2 cores"] / wide["Slow CPU, 2 cores"])
    assert len(logs) == 6
    interval = stats.ttest_1samp(logs, 0).confidence_interval()
    effect = table.loc["step_time_s", ["effect", "low", "high"]].astype(float)
    expected = np.exp([logs.mean(), interval.low, interval.high])
    assert effect.to_numpy() == pytest.approx(expected)
    assert table.loc["step_time_s", "n"] == table.loc["peak_allocated_gib", "n"] == 6
    assert table.loc["final_eval_loss", "n"] == 3


def test_further_seeds_in_another_folder_are_no_second_side(build):
    first, second = build("first"), build("second")
    for sweep, seeds in ((first, (0, 1)), (second, (2, 3))):
        for seed in seeds:
            sweep.run((1, 32, 1), seed=seed)
    cells = find_cells(load(first.path, second.path).runs)
    assert find_axis(cells) == ()
    assert compare_sweeps(cells) is None
    assert len(cells.table) == 1


def test_models_are_sides_and_budgets_are_not(build):
    for folder, width in (("narrow", 64), ("wide", 128)):
        sweep = build(folder)
        for seed in (0, 1):
            sweep.run((1, 8, 1), seed=seed, model__d_model=width)
    longer = build("longer")
    for seed in (0, 1):
        longer.run((1, 8, 1), seed=seed, model__d_model=64, optimizer_steps=60)
    models = find_cells(load(build("narrow").path, build("wide").path).runs)
    assert find_axis(models) == ("model.d_model",)
    budgets = find_cells(load(build("narrow").path, longer.path).runs)
    assert find_axis(budgets) == ()


def test_steps_to_a_target_that_both_sides_reached(build):
    cells = two_machines(build)
    runs = cells.runs
    slow = runs["hardware"].str.startswith("Slow")
    reaches = pd.concat(
        [
            runs[["sweep_dir", "run_id"]].assign(
                target_loss=target,
                outcome=np.where(slow | (target > 2), "reached", "censored"),
                steps_to_target=np.where(slow, 100.0, 150.0) * target,
            )
            for target in (1.0, 2.5, 3.0)
        ]
    )
    sides = compare_sweeps(cells, reaches)
    steps = sides.table[sides.table["quantity"].eq("steps_to_target")]
    assert steps["effect"].to_numpy(dtype=float) == pytest.approx([1.5, 1.5])
    assert steps["n"].tolist() == [3, 3]


def test_the_section_says_what_was_compared(build):
    runs = runs_of_two_machines(build)
    section = comparing_section(find_cells(runs))
    assert section.answer[0].startswith("The folders differ in hardware: hardware Slow CPU")
    (time,) = [text for text in section.answer if text.startswith("Step time")]
    assert time.endswith("in 2 of them the 95% interval leaves out 1.")
    # Sides without a cut in common.
    is_slow = runs["launch.device_model"].eq("Slow CPU")
    apart = comparing_section(find_cells(runs[is_slow == runs["micro_batch_size"].eq(32)]))
    assert apart.tables == ()
    assert apart.warnings[0].startswith("The sweep folders share no geometry")


@pytest.mark.slow
def test_the_first_folder_given_is_the_reference(build):
    cells = two_machines(build)
    order = cells.runs["sweep_dir"].sort_values(ascending=False, kind="stable").index
    turned = compare_sweeps(find_cells(cells.runs.loc[order].drop(columns="cell")))
    assert turned.names[0] == "hardware Fast CPU, 2 cores"
    assert set(turned.table["reference"]) == {turned.names[0]}
