from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis import compare, find_cells, load
from batchscape.analysis.cells import valid_figures
from batchscape.analysis.hardware import add_machines
from batchscape.analysis.numbers import TIMES
from batchscape.record.figures import COMPARED, FIGURES
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus
from batchscape.record.timing import why_run_untimed


def steps_of(sweep: Any) -> dict[str, pd.DataFrame]:
    """Rows of each sealed run, read with pandas alone."""
    folders = sorted((sweep.path / "runs").iterdir())
    paths = {f.name: f / "steps.parquet" for f in folders}
    return {name: pd.read_parquet(path) for name, path in paths.items() if path.exists()}


def test_the_table_of_a_study(build):
    comparison = compare(find_cells(load(build().fork().path).runs))
    # Four decompositions complete, and two cells are rejected.
    assert comparison["status"].tolist() == ["completed"] * 4 + ["rejected"] * 2
    assert comparison["n"].tolist() == [3] * 6
    assert comparison["n_completed"].tolist() == [3] * 4 + [0] * 2
    rejected = comparison[comparison["status"] == "rejected"]
    assert rejected["reason"].str.contains("must be a multiple").all()
    figures = [name for name in map(str, comparison) if name.endswith(("_mean", "_ci95"))]
    assert rejected[figures].isna().all(axis=None)
    assert rejected[[f"{name}_n" for name in COMPARED]].eq(0).all(axis=None)
    # Times of oversubscribed runs are left out, and nothing else.
    row = comparison.iloc[3]
    assert row["data_parallel_size"] == 4
    assert row["timing_note"] == "oversubscribed: 4 ranks on 2 cores"
    for name in COMPARED:
        if FIGURES[name].kind == "time":
            assert math.isnan(row[f"{name}_mean"])
            assert row[f"{name}_n"] == 0
    assert row["peak_allocated_gib_n"] == row["final_loss_n"] == 3


def test_mean_spread_and_interval_against_the_rows_themselves(build):
    sweep = build().fork(seeds=(0, 1, 2, 3))
    row = compare(find_cells(load(sweep.path).runs)).iloc[2]
    assert (row["data_parallel_size"], row["micro_batch_size"]) == (2, 8)
    losses, times, rows = [], [], steps_of(sweep)
    for run_id in row["run_ids"].split(";"):
        steps = rows[run_id]
        tail = steps[steps["samples"] > 0.9 * steps["samples"].max()]
        losses.append(float(tail["loss"].mean()))
        times.append(float(steps["step_time_s"][5:].median()))
    for name, values in (("final_loss", losses), ("step_time_s", times)):
        interval = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
        assert row[f"{name}_mean"] == pytest.approx(np.mean(values), rel=1e-12)
        half = (interval[1] - interval[0]) / 2
        assert row[f"{name}_ci95"] == pytest.approx(half, rel=1e-9)
        assert row[f"{name}_n"] == 4


def test_what_is_not_known_to_be_valid_is_no_time(build):
    sweep = build()
    for seed in range(4):
        sweep.run((1, 8, 4), seed=seed)
    runs = find_cells(load(sweep.path).runs).runs
    validity, losses = [True, np.nan, None, False], ["2.5", None, pd.NA, np.inf]
    columns = {"timing_valid": validity, "final_loss": losses}
    figures = valid_figures(
        runs.assign(**{k: pd.Series(v, runs.index, dtype=object) for k, v in columns.items()})
    )
    assert figures["step_time_s"].notna().tolist() == [True, False, False, False]
    assert figures["peak_allocated_gib"].notna().all()
    assert figures["final_loss"].tolist()[:1] == [2.5]
    assert figures["final_loss"].isna().tolist() == [False, True, True, True]


def test_the_report_asks_what_the_others_ask(build):
    """One run of each kind: what `why_untimed` says of its files is what the report says."""
    sweep = build()
    for seed, core_wait in enumerate((0.0, 0.09, 0.11, 0.72)):
        sweep.run(seed=seed, core_wait=core_wait)
    sweep.run(seed=4, concurrent_runs=2, core_wait=0.5)
    sweep.run(seed=5, launched=False)
    cells = find_cells(load(sweep.path).runs)
    assert not [name for name in cells.runs if name.startswith("launch.timing")]
    notes = cells.runs.set_index("run_id")["timing_note"]
    valid = cells.runs.set_index("run_id")["timing_valid"]
    for folder in SweepFolder(sweep.path).run_folders():
        expected = why_run_untimed(folder, RunStatus.read(folder.status))
        note = notes[folder.path.name]
        assert (None if pd.isna(note) else note) == expected
        assert valid[folder.path.name] == (expected is None)
    assert valid.sum() == 2


def test_a_device_below_its_defaults_is_another_machine():
    """A run out of memory tells nothing of its device, and is of its sweep's."""
    gpu, limit = "NVIDIA H100 80GB HBM3", "power limit 500 W of 700 W"
    none: dict[str, Any] = {"device_limits": None, "throttled": None}
    free = {"device_limits": None, "throttled": False}
    limited = {"device_limits": limit, "throttled": False}
    rows = [
        ("limited", "completed", limited, f"{gpu}, {limit}"),
        ("limited", "oom", none, f"{gpu}, {limit}"),
        ("free", "completed", free, gpu),
        ("free", "oom", none, gpu),
        ("both", "completed", free, gpu),
        ("both", "completed", limited, f"{gpu}, {limit}"),
        ("both", "oom", none, gpu),  # cannot tell
    ]
    runs = pd.DataFrame(
        {
            "sweep_dir": sweep_dir,
            "status": status,
            "device_type": "cuda",
            "launch.device_model": gpu,
            "launch.world_size": 1,
            "launch.timing_valid": True,
            **device,
        }
        for sweep_dir, status, device, _ in rows
    )
    assert add_machines(runs)["hardware"].tolist() == [hardware for *_, hardware in rows]


def test_only_valid_times_enter_a_cell_that_has_both(build):
    sweep = build()
    sweep.run(seed=0)
    sweep.run(seed=1, concurrent_runs=2)
    sweep.run(seed=2, launched=False)
    runs = load(sweep.path).runs
    row = compare(find_cells(runs)).iloc[0]
    assert row["step_time_s_n"] == 1
    alone = runs.set_index("seed").loc[0, "step_time_s"]
    assert row["step_time_s_mean"] == alone
    assert row["final_loss_n"] == 3
    assert row["timing_note"] == ("2 runs at the same time | no record of how it was launched")


def test_runs_that_failed_stay_in_n_and_out_of_the_figures(build):
    sweep = build()
    for seed in (0, 1):
        sweep.run(seed=seed)
    sweep.run(seed=2, status="failed", reason="rank 0 died by signal 9", done=7)
    sweep.run(seed=3, status="diverged", reason="the loss is NaN", done=9)
    sweep.run(seed=4, status="oom", reason="out of memory", done=1)
    row = compare(find_cells(load(sweep.path).runs)).iloc[0]
    assert row["status"] == "completed 2, diverged 1, failed 1, oom 1"
    assert (row["n"], row["n_completed"], row["final_loss_n"]) == (5, 2, 2)
    assert row["reason"] == "out of memory | rank 0 died by signal 9 | the loss is NaN"
    assert len(row["run_ids"].split(";")) == 5


@pytest.mark.slow
def test_repeats_of_one_trajectory_count_once_for_losses(build):
    sweep = build()
    for seed in (0, 1, 2):
        for repeat in range(2):
            sweep.run(seed=seed, timing_repeat=repeat)
    runs = load(sweep.path).runs
    row = compare(find_cells(runs)).iloc[0]
    assert (row["n"], row["step_time_s_n"], row["final_loss_n"]) == (6, 6, 3)
    by_seed = runs.groupby("seed")["final_loss"].mean()
    half = stats.t.ppf(0.975, 2) * stats.sem(by_seed)
    assert row["final_loss_ci95"] == pytest.approx(half)


def test_a_completed_run_with_a_nan_loss_is_missing_not_zero(build):
    sweep = build()
    sweep.run(seed=0)
    sweep.run(seed=1, loss=lambda step: np.where(step > 30, np.nan, 3.0))
    row = compare(find_cells(load(sweep.path).runs)).iloc[0]
    assert (row["n_completed"], row["final_loss_n"], row["final_eval_loss_n"]) == (2, 1, 2)


def test_throughput_is_compared_run_by_run_with_the_first_cell(build):
    sweep = build().fork(seeds=(0, 1, 2))
    runs = load(sweep.path).runs
    cells = find_cells(runs)
    comparison = compare(cells)
    reference, _, row, oversubscribed = (comparison.iloc[i] for i in range(4))
    assert reference["throughput_ratio"] == 1
    assert math.isnan(reference["throughput_ratio_low"])
    references = comparison["throughput_ratio_reference"].dropna()
    assert references.tolist() == [f"1{TIMES}32{TIMES}1"] * 3
    assert math.isnan(oversubscribed["throughput_ratio"])
    wide = runs[runs["status"] == "completed"].pivot_table(
        index="seed", columns=["data_parallel_size", "micro_batch_size"], values="tokens_per_s"
    )
    logs = np.log(wide[2, 8] / wide[1, 32])
    interval = np.exp(stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs)))
    assert row["throughput_ratio"] == pytest.approx(stats.gmean(wide[2, 8] / wide[1, 32]))
    assert row["throughput_ratio_low"] == pytest.approx(interval[0])
    assert row["throughput_ratio_high"] == pytest.approx(interval[1])
    assert row["throughput_ratio_n"] == 3


@pytest.mark.slow
def test_unpaired_seeds_have_no_ratio(build):
    sweep = build()
    sweep.run((1, 32, 1), seed=0)
    sweep.run((1, 8, 4), seed=1)
    row = compare(find_cells(load(sweep.path).runs)).iloc[1]
    assert math.isnan(row["throughput_ratio"])


def test_one_seed_has_no_spread(build):
    row = compare(find_cells(load(build().fork(seeds=(0,)).path).runs)).iloc[0]
    assert row["final_loss_n"] == 1
    assert math.isfinite(row["final_loss_mean"])
    assert math.isnan(row["final_loss_ci95"])
