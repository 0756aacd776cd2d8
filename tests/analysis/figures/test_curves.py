from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis import find_cells, load, mean_curves
from batchscape.analysis.figures.curves import MAX_POINTS


def test_mean_and_range_over_runs(build: Any) -> None:
    sweep = build()
    folders = [sweep.run(seed=seed) for seed in range(3)]
    tables = load(sweep.path)
    curves = mean_curves(find_cells(tables.runs), tables.steps, "loss", timed=False)
    rows = [pd.read_parquet(f.parquet("steps")) for f in folders]
    losses = np.array([r["loss"].to_numpy(float) for r in rows])
    np.testing.assert_allclose(curves["mean"], losses.mean(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(curves["low"], losses.min(axis=0))
    np.testing.assert_array_equal(curves["high"], losses.max(axis=0))
    times = np.mean([r["train_time_s"].to_numpy(float) for r in rows], axis=0)
    np.testing.assert_allclose(curves["train_time_s"], times, rtol=1e-12)
    np.testing.assert_array_equal(curves["samples"], rows[0]["samples"].to_numpy(int))


def test_the_mean_ends_where_the_first_run_ends(build: Any) -> None:
    sweep = build()
    sweep.run(seed=0)
    sweep.run(seed=1, done=25, stop_reason="target")
    tables = load(sweep.path)
    curves = mean_curves(find_cells(tables.runs), tables.steps, "loss", timed=False)
    assert curves["optimizer_step"].max() == 25


def test_long_curves_are_averaged_over_equal_windows(build: Any) -> None:
    sweep = build()
    folder = sweep.run((1, 1, 1), optimizer_steps=5 * MAX_POINTS)
    tables = load(sweep.path)
    curves = mean_curves(find_cells(tables.runs), tables.steps, "loss", timed=False)
    assert len(curves) == MAX_POINTS
    losses = pd.read_parquet(folder.parquet("steps"))["loss"].to_numpy(float)
    np.testing.assert_allclose(curves["mean"], losses.reshape(-1, 5).mean(axis=1), rtol=1e-12)
    assert curves["optimizer_step"].iloc[0] == 3


def test_only_valid_times_are_drawn_against_time(build: Any) -> None:
    sweep = build().fork(seeds=(0, 1))
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    assert set(mean_curves(cells, tables.steps, "loss", timed=True)["cell"]) == {0, 1, 2}
    assert set(mean_curves(cells, tables.steps, "loss", timed=False)["cell"]) == {0, 1, 2, 3}
