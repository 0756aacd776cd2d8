from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import find_cells, load
from batchscape.analysis.equivalence.decompositions import (
    differences_by_cell,
    members_of,
    step_differences,
)
from batchscape.analysis.numbers import TIMES


def losses(sweep: Any, geometry: tuple[int, int, int]) -> pd.DataFrame:
    """Loss by optimizer step (rows) and seed (columns), read with pandas alone."""
    devices, micro, accumulation = geometry
    pattern = f"*-d{devices}-m{micro}-a{accumulation}-*/steps.parquet"
    files = sorted((sweep.path / "runs").glob(pattern))
    return pd.concat(
        [pd.read_parquet(f).set_index("optimizer_step")["loss"] for f in files], axis=1
    ).astype(float)


def compared(tables: Any) -> pd.DataFrame:
    cells = find_cells(tables.runs)
    return differences_by_cell(cells, *step_differences(members_of(cells), tables.steps))


def test_differences_against_the_rows_themselves(build):
    sweep = build().fork(seeds=(0, 1, 2))
    tables = load(sweep.path)
    table = compared(tables)
    assert table["reference"].tolist() == [f"1{TIMES}32{TIMES}1"] * 3
    assert table["n_trajectories"].tolist() == [3] * 3
    assert table["n_optimizer_steps"].tolist() == [120] * 3
    base = losses(sweep, (1, 32, 1))
    for row, geometry in zip(
        table.to_dict("records"), [(1, 8, 4), (2, 8, 2), (4, 8, 1)], strict=True
    ):
        difference = (losses(sweep, geometry).to_numpy() - base.to_numpy()).ravel()
        relative = difference / base.to_numpy().ravel()
        assert row["max_abs_difference"] == np.abs(difference).max()
        assert row["rms_difference"] == pytest.approx(np.sqrt(np.mean(difference**2)))
        assert row["max_relative_difference"] == pytest.approx(np.abs(relative).max())
        assert row["rms_relative_difference"] == pytest.approx(np.sqrt(np.mean(relative**2)))
        spread = np.sqrt(base.var(axis=1, ddof=1).mean())
        assert row["seed_sd"] == pytest.approx(spread)
        assert row["rms_over_seed_sd"] == pytest.approx(row["rms_difference"] / spread)
        assert row["precision"] == "float32"


def test_one_seed_has_no_spread_but_has_differences(build):
    tables = load(build().fork(seeds=(0,)).path)
    table = compared(tables)
    assert table["max_abs_difference"].gt(0).all()
    assert table["seed_sd"].isna().all()
    assert table["rms_over_seed_sd"].isna().all()


def test_global_batches_are_never_mixed(build):
    sweep = build().fork(seeds=(0, 1))
    for seed in (0, 1):
        sweep.run((1, 64, 1), seed=seed)
        sweep.run((1, 8, 8), seed=seed)
        sweep.run((1, 128, 1), seed=seed)
    tables = load(sweep.path)
    table = compared(tables)
    pairs = list(zip(table["global_batch_size"], table["reference"], strict=True))
    assert pairs == [(32, f"1{TIMES}32{TIMES}1")] * 3 + [(64, f"1{TIMES}64{TIMES}1")]


def test_a_seed_that_the_reference_lacks_is_not_paired(build):
    sweep = build()
    sweep.run((1, 32, 1), seed=0)
    sweep.run((1, 8, 4), seed=0)
    sweep.run((1, 8, 4), seed=1)
    sweep.run((2, 8, 2), seed=1)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    pairs, _ = step_differences(members_of(cells), tables.steps)
    # The third cell belongs to the family by way of the second, and shares no seed with the first.
    assert set(pairs["reference"]) == {0}
    assert set(pairs["cell"]) == {1}
    assert pairs["trajectory"].nunique() == 1


@pytest.mark.parametrize("seed", range(5))
def test_pairs_are_those_of_a_join(build, seed):
    """Two families and three seeds; steps are missing on either side, and in no order."""
    sweep = build()
    for run_seed in (0, 1, 2):
        for geometry in ((1, 32, 1), (1, 8, 4), (2, 8, 2), (1, 64, 1), (1, 16, 4)):
            if (run_seed, geometry) != (seed % 3, (1, 32, 1)):
                sweep.run(geometry, seed=run_seed)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    steps = tables.steps.sample(frac=0.8, random_state=seed)
    members = members_of(cells)
    pairs, _ = step_differences(members, steps)
    rows = steps[["run_id", "optimizer_step", "loss"]].astype({"run_id": object})
    rows = rows.merge(cells.runs[["run_id", "cell", "global_batch_size"]])
    rows = rows.merge(members[["run_id", "trajectory"]])
    base = rows["cell"] == rows.groupby("global_batch_size")["cell"].transform("min")
    keys = ["trajectory", "optimizer_step"]
    joined = rows[~base].merge(rows[base], on=keys, suffixes=("", "_reference"))
    joined["difference"] = joined["loss"] - joined["loss_reference"]
    differences, expected = (
        {tuple(row[:-1]): row[-1] for row in table[["cell", *keys, "difference"]].to_numpy()}
        for table in (pairs, joined)
    )
    assert len(differences) == len(pairs) > 150
    assert differences == expected


def test_missing_losses_and_open_runs_stay_out(build):
    sweep = build()
    sweep.run((1, 32, 1), loss=lambda step: np.where(step == 3, np.nan, 1.0))
    sweep.run((1, 8, 4), loss=lambda step: 0 * step + 1.5, rounding=0.0)
    sweep.run((2, 8, 2), status="running", done=5)
    tables = load(sweep.path)
    table = compared(tables)
    assert table["n_optimizer_steps"].tolist() == [39]
    assert table["max_abs_difference"].tolist() == [0.5]


def test_the_same_geometry_on_other_hardware_is_a_decomposition_too(build):
    here, there = build("here"), build("there")
    here.run()
    there.run(hardware="Other CPU", core_wait=0.01)
    tables = load(here.path, there.path)
    table = compared(tables)
    assert table["hardware"].tolist() == ["Other CPU, 2 cores"]
    assert table["reference"].tolist() == [f"1{TIMES}32{TIMES}1, hardware Example CPU, 2 cores"]


def test_what_is_not_invariant_is_noted(build):
    sweep = build()
    label = {"not_invariant": "dropout 0.1"}
    sweep.run((1, 32, 1), ranks=label)
    sweep.run((1, 8, 4), ranks=label)
    tables = load(sweep.path)
    table = compared(tables)
    assert table["note"].tolist() == ["not decomposition-invariant: dropout 0.1"]


def test_nothing_shared_gives_an_empty_table(build):
    sweep = build()
    sweep.run((1, 8, 1))
    sweep.run((1, 16, 1))
    sweep.reject((2, 32, None), 32, "no")
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    assert compared(tables).empty
    _, spread = step_differences(members_of(cells), tables.steps)
    assert spread["n"].eq(1).all()
    assert all(math.isnan(sd) for sd in spread["sd"])
