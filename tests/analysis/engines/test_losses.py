"""Losses of engines against each other: found again by looking at every pair of runs."""

from itertools import product

import numpy as np
import pytest

from batchscape.analysis import find_cells, load
from batchscape.analysis.engines.losses import compare_engines
from batchscape.analysis.engines.matching import counterparts, engines_of


def compared(sweep):
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    return tables, cells, compare_engines(cells, tables.steps)


def brute_force(tables, first, second):
    """Largest difference over all pairs of runs with one seed, by loops."""
    curves = {
        run: rows.sort_values("optimizer_step")["loss"].to_numpy(dtype=float)
        for run, rows in tables.steps.groupby("run_id", observed=True)
    }
    runs = tables.runs[["run_id", "seed", "engine.name"]].to_numpy().tolist()
    differences = [
        np.abs(curves[a] - curves[b]).max()
        for (a, seed, one), (b, other, two) in product(runs, runs)
        if seed == other and (one, two) == (first, second) and a != b
    ]
    return max(differences)


@pytest.mark.slow
def test_differences_are_those_of_every_pair_of_runs(engines):
    tables, cells, losses = compared(engines({"ddp": 1e-6, "fsdp": 3e-6, "fabric": -2e-6}))
    assert len(losses.pairs) == 3 + 3
    for row in losses.pairs.to_dict("records"):
        expected = brute_force(tables, row["engine"], row["other"])
        assert row["max_abs_difference"] == pytest.approx(expected, rel=1e-9)
        assert row["n_seeds"] == 2
        assert row["n_optimizer_steps"] == 2 * 40
        assert row["n_runs"] == (6 if row["engine"] == row["other"] else 12)
    assert losses.pairs["engine"].iloc[0] == losses.pairs["other"].iloc[0] == "ddp"
    # The spread between seeds is that of the first cut of ddp.
    first = cells.table.index[engines_of(cells).eq("ddp")][0]
    runs = cells.runs.loc[cells.runs["cell"] == first, "run_id"]
    rows = tables.steps[tables.steps["run_id"].isin(runs)]
    sd = rows.astype({"loss": float}).groupby("optimizer_step")["loss"].std()
    assert losses.pairs["seed_sd"].iloc[0] == pytest.approx(np.sqrt((sd**2).mean()))
    assert losses.spread["sd"].tolist() == pytest.approx(sd.tolist())


@pytest.mark.slow
def test_steps_are_held_against_the_first_cut_of_ddp(engines):
    _, _, losses = compared(engines({"fsdp": 1e-6, "ddp": 0.0}, cuts=[(1, 32, 1), (2, 8, 2)]))
    fsdp = losses.by_step[losses.by_step["engine"] == "fsdp"].sort_values("optimizer_step")
    # The second cut of fsdp is moved by 2e-6 a step.
    assert fsdp["largest"].tolist() == pytest.approx((2e-6 * np.arange(1, 41)).tolist(), rel=1e-6)
    assert losses.by_step.loc[losses.by_step["engine"] == "ddp", "largest"].eq(0).all()


def test_engines_without_a_common_seed_are_not_compared(build):
    sweep = build()
    sweep.run((1, 32, 1), seed=0, engine={"name": "ddp"})
    sweep.run((1, 32, 1), seed=1, engine={"name": "fsdp"})
    _, cells, losses = compared(sweep)
    assert len(counterparts(cells)) == 2
    assert losses.pairs.empty


def test_another_learning_rate_or_global_batch_is_no_counterpart(build):
    sweep = build()
    sweep.run((1, 32, 1), engine={"name": "ddp"})
    sweep.run((1, 16, 1), engine={"name": "fsdp"})
    sweep.run((1, 32, 1), engine={"name": "fabric"}, optimizer__learning_rate=3e-3)
    cells = find_cells(load(sweep.path).runs)
    assert counterparts(cells).empty


def test_settings_of_one_engine_are_in_its_name_and_no_engines_of_their_own(build):
    sweep = build()
    for stage in (0, 3):
        sweep.run((1, 32, 1), engine={"name": "deepspeed", "zero_stage": stage})
    cells = find_cells(load(sweep.path).runs)
    assert counterparts(cells).empty
    sweep.run((1, 32, 1), engine={"name": "ddp"})
    cells = find_cells(load(sweep.path).runs)
    names = ["ddp", "deepspeed, zero stage 0", "deepspeed, zero stage 3"]
    assert sorted(counterparts(cells)["engine"]) == names
