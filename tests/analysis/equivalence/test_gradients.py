"""Errors of first gradients: which runs are held against which, and by how much."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from batchscape.analysis import find_cells, load
from batchscape.analysis.equivalence.gradients import (
    gradient_error_table,
    gradient_errors,
    relative_distance,
    sketch_spread,
)
from batchscape.record.gradient_sketch import write_sketch

BASE = np.random.default_rng(0).normal(size=1024)
WHOLE, PARTS = (1, 32, 1), (1, 8, 4)


@pytest.fixture
def sketched(build: Any) -> Any:
    """Runs whose sketches are away from a common one by a known share of its norm."""
    sweep = build()

    def run(geometry: Any, error: float | None, seed: int = 0, **settings: Any) -> Any:
        folder = sweep.run(geometry, seed=seed, status="interrupted", **settings)
        if error is not None:
            away = np.zeros(1024)
            away[seed] = error * np.linalg.norm(BASE + seed)
            write_sketch(folder, BASE + seed + away)
        return folder

    run.sweep = sweep
    return run


def errors_of(run: Any, precisions: dict[str, str]) -> Any:
    runs = load(run.sweep.path).runs
    return gradient_errors(find_cells(runs.assign(precision=runs["run_id"].map(precisions))))


def test_errors_against_float64_and_between_decompositions(sketched):
    precisions = {}
    for seed in (0, 1, 2):
        for precision, geometry, error in (
            ("float64", WHOLE, 0.0),
            ("float64", PARTS, 1e-15),
            ("float32", WHOLE, 1e-7),
            ("float32", PARTS, 3e-7),
        ):
            # The precision that was asked for is part of the trajectory's name.
            folder = sketched(geometry, error, seed, engine__precision=precision)
            precisions[folder.path.name] = precision
    errors = errors_of(sketched, precisions)
    assert len(errors) == 9, "the two that everything is held against have nothing themselves"
    table = gradient_error_table(errors).set_index(["precision"], append=True)
    row_of = {
        (precision, row["relative_difference_n"]): row for (_, precision), row in table.iterrows()
    }
    assert row_of["float32", 0]["relative_error"] == pytest.approx(1e-7, rel=1e-6)
    assert math.isnan(row_of["float32", 0]["relative_difference"])
    assert row_of["float32", 3]["relative_error"] == pytest.approx(3e-7, rel=1e-6)
    assert row_of["float32", 3]["relative_difference"] == pytest.approx(2e-7, rel=1e-6)
    assert row_of["float64", 3]["relative_error"] < 1e-14
    row = row_of["float32", 3]
    assert row["relative_error_low"] <= row["relative_error"] <= row["relative_error_high"]
    assert row["relative_error_n"] == 3
    assert len(row["run_ids"].split()) == len(row["reference_run_ids"].split()) == 3


def test_without_float64_decompositions_are_still_compared(sketched):
    sketched(WHOLE, 0.0)
    sketched(PARTS, 2e-7)
    errors = errors_of(sketched, {})
    assert errors["relative_difference"].tolist() == pytest.approx([2e-7], rel=1e-6)
    assert errors["relative_error"].isna().all()


def test_other_seeds_and_settings_are_no_reference(sketched):
    precisions = {
        sketched(WHOLE, 0.0, seed=1, engine__precision="float64").path.name: "float64",
        sketched(WHOLE, 0.0, optimizer__learning_rate=1.0, engine__precision="float64")
        .path.name: "float64",
        sketched((1, 64, 1), 0.0, engine__precision="float64").path.name: "float64",
        sketched(WHOLE, 1e-7, engine__precision="float32").path.name: "float32",
    }  # fmt: skip
    assert errors_of(sketched, precisions).empty


def test_runs_without_a_sketch_are_tolerated(sketched):
    sketched(WHOLE, None)
    sketched(PARTS, 1e-7)
    sketched((2, 8, 2), 1e-7)
    broken = sketched((4, 8, 1), 1e-7)
    broken.gradient_sketch.write_bytes(b"torn")
    errors = errors_of(sketched, {})
    # The first decomposition that left one is what the others are held against.
    assert errors["relative_difference"].tolist() == [0.0]


def test_gradients_that_are_not_finite_have_no_error():
    assert math.isnan(relative_distance(np.full(4, math.nan), np.ones(4)))
    assert math.isnan(relative_distance(np.ones(4), np.zeros(4)))
    assert relative_distance(np.ones(4), np.ones(4)) == 0.0


def test_the_stated_spread_of_a_ratio():
    rng = np.random.default_rng(1)
    values, signs = rng.normal(size=(2, 5000)), rng.choice((-1, 1), (400, 5000))
    ratios = []
    for sign in signs:
        bucket = rng.integers(64, size=5000)
        one, other = (np.bincount(bucket, sign * v, minlength=64) for v in values)
        ratios.append(relative_distance(one + other, other))
    assert np.std(ratios) / np.mean(ratios) == pytest.approx(sketch_spread(64), rel=0.2)
