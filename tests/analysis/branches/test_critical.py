"""The critical batch by branches, where it is known in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from quadratic import (
    AGES,
    BATCHES,
    SMALL,
    TOLERANCE,
    WINDOW,
    drawn_losses,
    known_critical_batch,
    rate_of,
    rises_of,
    tables,
)

from batchscape.analysis.branches.critical import critical_batch, critical_batches
from batchscape.analysis.branches.topic import branches_section
from batchscape.analysis.cells import find_cells

SEEDS = 8


def test_the_interval_covers_and_the_critical_batch_grows() -> None:
    sweeps = 300
    drawn = drawn_losses(sweeps * SEEDS, seed=0)
    known = [known_critical_batch(age) for age in AGES]
    assert SMALL < known[0] < known[1] < known[2] < BATCHES[-1]
    for age, truth in zip(AGES, known, strict=True):
        rises = rises_of(drawn, age)
        for n in (3, 5, SEEDS):
            sweeps_of_n = rises[: sweeps * n].reshape(sweeps, n, -1)
            found = np.array([critical_batch(each, BATCHES, TOLERANCE) for each in sweeps_of_n])
            covers = (found[:, 1] <= truth) & (truth <= found[:, 2])
            # Three standard errors of 95 % of 300.
            assert abs(covers.mean() - 0.95) < 0.038, (age, n)
        assert np.nanmedian(found[:, 0]) == pytest.approx(truth, rel=0.05)


def found_in(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    return critical_batches(find_cells(runs), steps)


def test_rows_of_runs_give_what_their_trainings_do() -> None:
    rises = {age: rises_of(drawn_losses(SEEDS, seed=1), age) for age in AGES}
    table = found_in(*tables(SEEDS))
    assert table["age_samples"].tolist() == list(AGES)
    for row, each in zip(table.to_dict("records"), rises.values(), strict=True):
        expected = critical_batch(each, BATCHES, TOLERANCE)
        assert (row["estimate"], row["low"], row["high"]) == pytest.approx(expected)
        assert (row["n"], row["rate_exponent"]) == (SEEDS, 0.5)
        shown = [row[f"rise_{batch}"] for batch in BATCHES[1:]]
        assert shown == pytest.approx(each.mean(axis=0)[1:].tolist())


def test_what_is_not_tried_is_not_identified() -> None:
    rises = np.array([[0.0, 0.01, 0.02], [0.0, 0.012, 0.021], [0.0, 0.011, 0.022]])
    value, low, high = critical_batch(rises, (4, 8, 16), 0.03)
    assert (math.isnan(value), low, high) == (True, 16, math.inf)
    value, low, high = critical_batch(rises, (4, 8, 16), 0.005)
    assert (math.isnan(value), low, high) == (True, 0, 8)
    # Two seeds have a value alone.
    value, low, high = critical_batch(rises[:2], (4, 8, 16), 0.015)
    assert value == pytest.approx(8 * 2 ** ((0.015 - 0.011) / (0.0205 - 0.011)), rel=2e-3)
    assert math.isnan(low)
    assert math.isnan(high)


def test_a_branch_that_diverged_is_too_large() -> None:
    runs, steps = tables(SEEDS)
    is_lost = runs["run_id"].str.startswith("256-64-")
    runs.loc[is_lost, "status"] = "diverged"
    row = found_in(runs, steps).iloc[-1]
    assert row["n"] == SEEDS
    assert 16 < row["estimate"] <= 32.1
    assert row["high"] <= 32.1


def test_branches_by_another_rule_for_the_rate_are_another_row() -> None:
    runs, steps = tables(3)
    others = runs[runs["ramp_samples"].notna() & runs["ramp_samples"].eq("64")]
    name = "other-" + others["run_id"]
    flat = others.assign(
        run_id=name,
        trajectory_id=name,
        learning_rate=rate_of(SMALL),
        stages=[(first, (*last[:2], first[2])) for first, last in others["stages"]],
    )
    more = steps[steps["run_id"].isin(others["run_id"])]
    more = more.assign(run_id="other-" + more["run_id"], loss=more["loss"] + 1)
    table = found_in(pd.concat([runs, flat]), pd.concat([steps, more]))
    assert table["rate_exponent"].tolist() == [0.0, 0.5, 0.5, 0.5]
    assert table["rise_8"].iloc[0] == pytest.approx(table["rise_8"].iloc[1] + 1)


def test_a_run_that_goes_on_for_longer_stands_for_a_shorter_one() -> None:
    runs, steps = tables(3)
    expected = found_in(runs, steps)["estimate"].iloc[0]
    runs = runs[runs["planned_samples"].eq(AGES[0] + WINDOW)]
    longer = runs.assign(
        planned_samples=runs["planned_samples"].mask(runs["ramp_samples"].isna(), 10_000)
    )
    assert found_in(longer, steps)["estimate"].tolist() == [expected]
    # A rate that depends on the end makes it another training.
    assert found_in(longer.assign(**{"schedule.name": "cosine"}), steps).empty


def texts_of(runs: pd.DataFrame, steps: pd.DataFrame) -> Sequence[str]:
    section = branches_section(find_cells(runs), steps)
    assert section is not None
    return section.answer


def test_no_branch_is_no_section() -> None:
    runs, steps = tables(3)
    assert branches_section(find_cells(runs[runs["ramp_samples"].isna()]), steps) is None
    alone = runs[runs["ramp_samples"].notna()]
    assert branches_section(find_cells(alone), steps) is None
    assert "loses at most 0.05 nats against 4" in texts_of(runs, steps)[0]
