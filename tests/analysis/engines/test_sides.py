"""Engines against each other: found again by looking at every pair of runs."""

import numpy as np
import pytest
from scipy import stats

from batchscape.analysis import find_cells, load
from batchscape.analysis.engines.sides import compare_engines, engine_members


def compared(sweep):
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    return tables, cells, compare_engines(cells, tables.steps)


def curves_of(tables, engine, cut):
    """Losses (seeds, optimizer steps) of one engine and cut."""
    names = ["engine.name", "micro_batch_size", "gradient_accumulation_steps"]
    runs = tables.runs[(tables.runs[names] == [engine, *cut[1:]]).all(axis=1)]
    rows = tables.steps[tables.steps["run_id"].isin(runs["run_id"])].merge(runs[["run_id", "seed"]])
    return rows.pivot_table(index="seed", columns="optimizer_step", values="loss").to_numpy(float)


@pytest.mark.slow
def test_differences_are_those_of_every_pair_of_runs(engines):
    tables, _, table = compared(engines({"ddp": 1e-6, "fsdp": 3e-6, "fabric": -2e-6}))
    assert len(table) == 2 * 3
    assert table["reference"].eq("ddp").all()
    for row in table.to_dict("records"):
        cut = (0, row["micro_batch_size"], row["gradient_accumulation_steps"])
        base, other = (curves_of(tables, engine, cut) for engine in ("ddp", row["engine"]))
        expected = np.abs(base - other).max()
        assert row["max_abs_difference"] == pytest.approx(expected, rel=1e-9)
        relative = np.abs((base - other) / base).max()
        assert row["max_relative_difference"] == pytest.approx(relative, rel=1e-9)
        assert row["n_trajectories"] == 2
        assert row["n_optimizer_steps"] == 2 * 40
        sd = base.std(axis=0, ddof=1)
        assert row["seed_sd"] == pytest.approx(np.sqrt((sd**2).mean()))


def test_ratios_are_of_runs_paired_by_seed(engines):
    """Against scipy's t-interval of mean logarithms."""
    sweep = engines({"ddp": 0.0, "fsdp": 0.0}, cuts=[(1, 32, 1)], seeds=(0, 1, 2))
    tables, _, table = compared(sweep)
    times = tables.runs.pivot_table(index="seed", columns="engine.name", values="step_time_s")
    logs = np.log((times["fsdp"] / times["ddp"]).to_numpy(float))
    (row,) = table.to_dict("records")
    assert row["step_time_s_ratio"] == pytest.approx(np.exp(logs.mean()))
    assert row["step_time_s_ratio_n"] == 3
    if logs.std() > 0:
        ends = np.exp(stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs)))
        assert (row["step_time_s_ratio_low"], row["step_time_s_ratio_high"]) == pytest.approx(
            tuple(ends)
        )
    assert row["peak_allocated_gib_ratio"] == 1.0


def test_times_that_are_not_valid_stay_out(build):
    sweep = build()
    for engine in ("ddp", "fsdp"):
        sweep.run((1, 32, 1), engine={"name": engine}, concurrent_runs=2)
    _, _, table = compared(sweep)
    assert table["step_time_s_ratio"].isna().all()
    assert table["peak_allocated_gib_ratio"].notna().all()


def test_engines_without_a_common_seed_are_not_compared(build):
    sweep = build()
    sweep.run((1, 32, 1), seed=0, engine={"name": "ddp"})
    sweep.run((1, 32, 1), seed=1, engine={"name": "fsdp"})
    _, cells, table = compared(sweep)
    assert len(engine_members(cells)) == 2
    assert table.empty


def test_another_learning_rate_or_global_batch_is_no_counterpart(build):
    sweep = build()
    sweep.run((1, 32, 1), engine={"name": "ddp"})
    sweep.run((1, 16, 1), engine={"name": "fsdp"})
    sweep.run((1, 32, 1), engine={"name": "fabric"}, optimizer__learning_rate=3e-3)
    cells = find_cells(load(sweep.path).runs)
    assert engine_members(cells).empty


def test_settings_of_one_engine_are_in_its_name_and_no_engines_of_their_own(build):
    sweep = build()
    for stage in (0, 3):
        sweep.run((1, 32, 1), engine={"name": "deepspeed", "zero_stage": stage})
    cells = find_cells(load(sweep.path).runs)
    assert engine_members(cells).empty
    sweep.run((1, 32, 1), engine={"name": "ddp"})
    cells = find_cells(load(sweep.path).runs)
    names = ["ddp", "deepspeed, zero stage 0", "deepspeed, zero stage 3"]
    assert sorted(engine_members(cells)["engine"]) == names


def test_another_cost_is_no_counterpart_and_two_runs_have_no_interval(build):
    """Of ddp with and without workers, fsdp with workers is held against the one with them."""
    sweep = build()
    for engine, workers in (("ddp", 0), ("ddp", 4), ("fsdp", 4)):
        for seed in (0, 1):
            sweep.run((1, 32, 1), seed=seed, engine={"name": engine}, loader__workers=workers)
    _, cells, table = compared(sweep)
    (row,) = table.reset_index().to_dict("records")
    assert (row["engine"], row["reference"], row["step_time_s_ratio_n"]) == ("fsdp", "ddp", 2)
    base = engine_members(cells).query("engine == 'ddp'")["cell"].unique()
    assert cells.table["loader.workers"][base].tolist() == ["4"]
    assert np.isnan([row["step_time_s_ratio_low"], row["step_time_s_ratio_high"]]).all()
