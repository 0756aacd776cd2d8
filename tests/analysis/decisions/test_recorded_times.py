"""Times to a target are those that runs recorded; what is made of steps is held against them."""

import math

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.cells import find_cells
from batchscape.analysis.cost.table import cost_table
from batchscape.analysis.decisions.evidence import bases_of, gather
from batchscape.analysis.decisions.recommend import Needs, recommend
from batchscape.analysis.learning_rate.choice import at_best_learning_rate
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.curves import curves_of
from batchscape.record.tables import load

CUTS = [(1, 8, 4), (1, 32, 1)]


def falling(rate):
    """Held-out losses that fall from 4 by `rate` a step."""
    return lambda when: 1.0 + 3.0 * np.exp(-rate * when)


@pytest.fixture
def uneven(build):
    """Runs whose warm-up, and every fifth step, take five and three times as long."""
    sweep = build("uneven")
    for seed in range(3):
        for cut, slow_by in zip(CUTS, (5.0, 3.0), strict=True):
            sweep.run(
                cut, seed=seed, slow_by=slow_by, held_out=falling(0.2 + 0.02 * seed), loss=np.exp
            )
    return sweep


def by_hand(sweep, target):
    """Geometric means, by cut, of the times at which the curves cross the target."""
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    reaches = steps_to_target(curves_of(cells, tables), [target])
    micro = reaches["cell"].map(cells.table["micro_batch_size"])
    return np.exp(np.log(reaches["time_to_target_s"]).groupby(micro).mean())


def test_the_time_to_a_target_is_the_one_that_the_runs_recorded(uneven):
    target = 1.5
    (basis,) = gather([uneven.path], target)
    recommendation = recommend(basis, Needs())
    measured = recommendation.candidates[recommendation.candidates["source"].eq("measured")]
    measured = measured.set_index("micro_batch_size")
    recorded = by_hand(uneven, target)
    for micro in (8, 32):
        row = measured.loc[micro]
        assert row["time_s"] == pytest.approx(recorded[micro])
        assert not row["derived"]
        # The median step is none of the slow ones, of which there are more on the way there.
        cut_rows = basis.table[basis.table["micro_batch_size"].eq(micro)]
        by_median = row["steps"] * np.exp(np.log(cut_rows["step_time_s"]).mean())
        assert row["time_s"] > 1.5 * by_median
    assert "seeds reached it; recorded by the runs)." in recommendation.reasons[-1]


def test_the_mean_step_counts_warm_up_and_slow_steps(uneven):
    tables = load(uneven.path)
    table = cost_table(find_cells(tables.runs))
    times = tables.steps.groupby("run_id")["step_time_s"].mean()
    expected = table["run_id"].astype(str).map(times.to_dict())
    assert table["mean_step_time_s"].to_numpy() == pytest.approx(expected.to_numpy(dtype=float))


def test_a_deadline_is_held_against_the_recorded_time(uneven):
    target = 1.5
    (basis,) = gather([uneven.path], target)
    slow = float(by_hand(uneven, target).min())
    mean_times = basis.table.groupby("micro_batch_size")["step_time_s"].mean()
    steps = recommend(basis, Needs()).chosen["steps"]
    assert steps * mean_times.min() < slow / 1.5
    recommendation = recommend(basis, Needs(deadline_s=slow / 1.5))
    assert any("SURE TO MEET THE DEADLINE" in text for text in recommendation.warnings)


def test_a_time_that_no_run_at_the_rate_recorded_is_derived_of_its_mean_step(build):
    sweep = build("rates")
    for seed in range(3):
        sweep.run((1, 32, 1), seed=seed, slow_by=5.0, held_out=falling(0.3), loss=np.exp)
        slower = {"held_out": falling(0.1), "loss": np.exp, "optimizer__learning_rate": 0.002}
        sweep.run((1, 8, 4), seed=seed, slow_by=5.0, **slower)
    (basis,) = gather([sweep.path], 1.5)
    rows = recommend(basis, Needs()).candidates.set_index("micro_batch_size")
    rows = rows[rows["source"].eq("measured")]
    assert rows["derived"].to_dict() == {32: False, 8: True}
    cut_rows = basis.table[basis.table["micro_batch_size"].eq(8)]
    mean = np.exp(np.log(cut_rows["mean_step_time_s"]).mean())
    assert rows.loc[8, "time_s"] == pytest.approx(rows.loc[8, "steps"] * mean)


def test_a_target_that_one_batch_misses_leaves_it_out_and_is_answered(build):
    sweep = build("missed")
    for seed in range(3):
        for rate in (0.001, 0.002):
            rates = {"optimizer__learning_rate": rate, "loss": np.exp}
            sweep.run((1, 32, 1), seed=seed, held_out=falling(100 * rate), **rates)
            sweep.run((1, 32, 4), seed=seed, held_out=falling(rate), **rates)
    (basis,) = gather([sweep.path], 1.5)
    recommendation = recommend(basis, Needs())
    assert recommendation.geometry == (1, 32, 1)
    assert ", learning rate 0.00200, to reach" in recommendation.headline
    assert any("it is left out of the choice" in text for text in recommendation.warnings)
    missed = recommendation.candidates.set_index("global_batch_size").loc[128]
    missed = missed[missed["source"].eq("measured")].iloc[0]
    assert math.isinf(missed["time_s"])
    assert (missed["n_reached"], missed["n_seeds"]) == (0, 3)
    assert math.isnan(missed["learning_rate"])


def test_the_lowest_target_that_a_run_reached_is_chosen_for(build):
    """Of several targets one that nobody reached leaves the others their answer."""
    sweep = build("two_targets")
    for seed in range(3):
        for cut in ((1, 32, 1), (1, 32, 4)):
            sweep.run(cut, seed=seed, loss=np.exp, held_out=falling(0.1))
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    curves = curves_of(cells, tables)
    low = float(curves["loss"].min())
    targets = [2 * low, 0.5 * low]
    (basis,) = bases_of(cells, tables, reaches=steps_to_target(curves, targets))
    recommendation = recommend(basis, Needs())
    assert recommendation.target_loss == targets[0]
    assert recommendation.geometry is not None
    assert any(f"the choice is for {targets[0]:.4g}" in text for text in recommendation.warnings)
    (missed,) = bases_of(cells, tables, reaches=steps_to_target(curves, targets[1:]))
    assert "in no global batch most runs reached a target" in str(
        recommend(missed, Needs()).why_not
    )


def test_the_share_of_seeds_decides_where_no_rate_took_all_of_them():
    """3 of 3 at one rate, 4 of 5 at another, with seeds of their own."""
    few = [(0.1, f"a{seed}", 200.0) for seed in range(3)]
    many = [(0.2, f"b{seed}", math.nan if seed == 4 else 100.0) for seed in range(5)]
    rows = pd.DataFrame([*few, *many], columns=["learning_rate", "seed", "steps_to_target"])
    kept = at_best_learning_rate(rows.assign(global_batch_size=32))
    assert set(kept["learning_rate"]) == {0.1}
