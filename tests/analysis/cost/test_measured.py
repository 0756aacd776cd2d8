"""Step times of runs that were not launched, from runs that ended."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats

from batchscape.analysis.cost.measured import MeasuredSteps
from batchscape.analysis.cost.step_time import fit_step_time
from batchscape.analysis.hardware import add_machines
from batchscape.geometry import BatchGeometry
from batchscape.record.files import write_json
from batchscape.record.spec import RunSpec
from batchscape.record.tables import load

HARDWARE = "Example CPU, 2 cores"


def test_the_cost_model_of_runs_like_it_tells_a_step_time(build):
    sweep = build()
    cuts = [(1, 32, 1), (1, 8, 4), (2, 8, 2), (2, 16, 1), (1, 16, 2)]
    folders = [sweep.run(cut, seed=seed) for cut in cuts for seed in (0, 1)]
    # A smaller network on the same machine takes another time, and so does another machine.
    sweep.run((1, 32, 1), model__d_model=64)
    sweep.run((1, 32, 1), seed=7, hardware="Another CPU")
    sweep.run((1, 32, 1), seed=8, concurrent_runs=2)
    measured = MeasuredSteps([sweep.path], lambda name: name == HARDWARE)
    runs = add_machines(load(sweep.path).runs)
    like_runs = runs[runs["run_id"].isin([folder.path.name for folder in folders])]
    oracle = fit_step_time(like_runs)
    spec = RunSpec.read(folders[0].config)
    for devices, micro, accumulation in (*cuts, (2, 8, 4)):
        geometry = BatchGeometry(1, devices, micro, accumulation)
        estimate = measured(spec, geometry)
        expected = oracle.at(devices, micro, accumulation)
        assert estimate is not None
        assert (estimate.value, estimate.low, estimate.high) == pytest.approx(
            (expected.value, expected.low, expected.high)
        )
        assert estimate.n == 10
    outside = BatchGeometry(1, 2, 4, 4)
    assert measured(spec, outside) is None, "no run had a micro-batch as small"
    assert measured(replace(spec, precision="bfloat16"), spec.geometry) is None
    assert MeasuredSteps([sweep.path], lambda name: name == "Another")(spec, spec.geometry) is None


def test_a_cut_with_runs_of_its_own_is_told_by_them(build):
    """Whatever the cost model says of it; against scipy's t-interval of mean logarithms."""
    sweep = build()
    folders = [sweep.run(cut, seed=s) for cut in ((1, 32, 1), (1, 8, 4)) for s in range(3)]
    folders += [sweep.run((1, 16, 2))]
    measured = MeasuredSteps([sweep.path], lambda name: name == HARDWARE)
    spec = RunSpec.read(folders[0].config)
    runs = load(sweep.path).runs
    for micro, accumulation, n in ((32, 1, 3), (8, 4, 3), (16, 2, 7)):
        estimate = measured(spec, BatchGeometry(1, 1, micro, accumulation))
        assert estimate is not None
        assert estimate.n == n
        if n > 3:
            continue
        logs = np.log(runs.loc[runs["micro_batch_size"].eq(micro), "step_time_s"].astype(float))
        ends = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
        assert (estimate.low, estimate.high) == pytest.approx(tuple(np.exp(ends)))
        assert estimate.value == pytest.approx(stats.gmean(np.exp(logs)))


def test_an_interval_that_tells_nothing_is_none(build):
    sweep = build()
    folders = [sweep.run((1, 32, 1), seed=seed) for seed in range(3)]
    measured = MeasuredSteps([sweep.path], lambda name: name == HARDWARE)
    spec = RunSpec.read(folders[0].config)
    (table,) = measured._tables.values()
    table["step_time_s"] = [0.001, 0.01, 0.1]
    assert measured(spec, spec.geometry) is None


def test_an_exchange_that_was_never_measured_is_not_guessed(build):
    sweep = build()
    folder, *_ = [sweep.run(cut) for cut in [(1, 32, 1), (1, 8, 4), (1, 16, 2)]]
    measured = MeasuredSteps([sweep.path], lambda name: name == HARDWARE)
    spec = RunSpec.read(folder.config)
    assert measured(spec, BatchGeometry(1, 1, 32, 1)) is not None
    assert measured(spec, BatchGeometry(1, 2, 8, 2)) is None


def test_peaks_of_runs_tell_how_far_predictions_are_off(build):
    """Against statsmodels' prediction interval of a mean of logarithms."""
    sweep = build()
    cuts = [(1, 32, 1), (1, 8, 4), (1, 16, 2), (1, 4, 8)]
    shares = [1.02, 1.12, 1.05, 0.97]

    def memory_range(**changes: Any) -> tuple[float, float, int] | None:
        spec = replace(RunSpec.read(folder.config), **changes)
        return MeasuredSteps([sweep.path], lambda name: name == HARDWARE).memory_range(spec)

    for number, (cut, share) in enumerate(zip(cuts, shares, strict=True)):
        for seed in (0, 1):  # two seeds of one prediction are one training
            folder = sweep.run(cut, seed=seed)
            (run,) = load(sweep.path).runs.query("run_id == @folder.path.name").to_dict("records")
            prediction = {"value": run["peak_allocated_gib"] / share, "method": "fake tensors"}
            write_json(folder.prediction, {"peak_allocated_gib": prediction})
        assert (memory_range() is None) == (number < 2)
    ones = np.ones(len(shares))
    fit = sm.OLS(np.log(shares), ones).fit()
    ((low, high),) = fit.get_prediction([1.0]).conf_int(obs=True, alpha=0.05)
    assert memory_range() == pytest.approx((math.exp(low), math.exp(high), 4))
    assert memory_range(device_type="cuda") is None
    assert memory_range(precision="float16") is None


def test_a_range_is_never_narrower_than_a_hundredth(build):
    sweep = build()
    for micro in (1, 2, 4):
        folder = sweep.run((1, micro, 32 // micro))
        (run,) = load(sweep.path).runs.query("run_id == @folder.path.name").to_dict("records")
        prediction = {"value": run["peak_allocated_gib"], "method": "fake tensors"}
        write_json(folder.prediction, {"peak_allocated_gib": prediction})
    spec = RunSpec.read(folder.config)
    memory_range = MeasuredSteps([sweep.path], lambda name: name == HARDWARE).memory_range(spec)
    assert memory_range == pytest.approx((0.99, 1.01, 3))


def test_two_runs_tell_no_step_time(build):
    sweep = build()
    folder, _ = [sweep.run((1, 32, 1), seed=seed) for seed in (0, 1)]
    spec = RunSpec.read(folder.config)
    assert MeasuredSteps([sweep.path], lambda name: name == HARDWARE)(spec, spec.geometry) is None
