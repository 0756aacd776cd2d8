"""Which runs stand for a tuned learning rate, and when the reader is warned."""

import math

import pandas as pd
import pytest

from batchscape.analysis.learning_rate.choice import (
    at_best_learning_rate,
    cells_at_best,
    tuning_warning,
)
from batchscape.errors import AnalysisError

GRID = (0.001, 0.002, 0.004)


def reaches(steps, *, rates=GRID, seeds=(0, 1, 2), target=2.0):
    """`steps[batch]` holds the steps at each rate; seed s takes s steps more."""
    rows = [
        {
            "global_batch_size": batch,
            "seed": seed,
            "learning_rate": rate,
            "target_loss": target,
            "steps_to_target": float(value + seed),
            "outcome": "censored" if math.isnan(value) else "reached",
            "run_id": f"b{batch}-lr{rate}-s{seed}",
        }
        for batch, values in steps.items()
        for rate, value in zip(rates, values, strict=True)
        for seed in seeds
    ]
    return pd.DataFrame(rows)


TUNED = {8: (300, 100, 200), 32: (200, 90, 100)}


def test_the_best_rate_of_each_batch_is_kept():
    chosen = at_best_learning_rate(reaches({8: (300, 100, 200), 32: (90, 50, 40)}))
    by_batch = chosen.groupby("global_batch_size")
    assert by_batch["learning_rate"].unique().map(list).to_dict() == {8: [0.002], 32: [0.004]}
    assert by_batch["tuned"].first().to_dict() == {8: True, 32: False}
    assert by_batch["edge"].first().to_dict() == {8: False, 32: True}
    assert by_batch.size().tolist() == [3, 3]
    assert set(reaches(TUNED).columns) <= set(chosen.columns)


def test_seeds_that_ran_at_one_rate_only_are_kept_at_it():
    """A study of five seeds at one rate, joined to a grid of three."""
    more = reaches({8: (100,), 32: (90,)}, rates=(0.002,), seeds=(3, 4))
    chosen = at_best_learning_rate(pd.concat([reaches(TUNED), more]))
    assert sorted(chosen[chosen["global_batch_size"] == 8]["seed"]) == [0, 1, 2, 3, 4]
    assert chosen["tuned"].all()
    assert set(chosen["n_learning_rates"]) == {3}


def test_one_seed_at_a_new_rate_chooses_nothing():
    new = reaches({8: (10,), 32: (9,)}, rates=(0.003,), seeds=(0,))
    chosen = at_best_learning_rate(pd.concat([reaches(TUNED), new]))
    assert chosen.groupby("global_batch_size").size().tolist() == [3, 3]
    assert set(chosen["learning_rate"]) == {0.002}
    # Nor where no rate took every seed to the target, though the one seed got there.
    missed = reaches(TUNED)
    missed.loc[missed["seed"] == 0, "steps_to_target"] = math.inf
    chosen = at_best_learning_rate(pd.concat([missed, new]))
    assert set(chosen["learning_rate"]) == {0.002}


def test_targets_have_rates_of_their_own():
    both = pd.concat(
        [reaches({8: (30, 10, 20)}), reaches({8: (300, 200, 100)}, target=1.0)], ignore_index=True
    )
    chosen = at_best_learning_rate(both).groupby("target_loss")["learning_rate"].first()
    assert chosen.to_dict() == {2.0: 0.002, 1.0: 0.004}


def test_a_rate_at_which_a_seed_missed_is_not_the_best():
    table = reaches(TUNED)
    lucky = (table["learning_rate"] == 0.002) & (table["seed"] == 2)
    table.loc[lucky, "steps_to_target"] = math.nan
    chosen = at_best_learning_rate(table)
    assert (chosen["learning_rate"] == 0.004).all()


def test_where_no_rate_took_all_seeds_the_one_of_most_is_kept():
    table = reaches({8: (100, 200, 300)})
    table.loc[table["seed"] == 0, "steps_to_target"] = math.inf
    table.loc[(table["seed"] == 1) & (table["learning_rate"] == 0.001), "steps_to_target"] = (
        math.nan
    )
    chosen = at_best_learning_rate(table)
    assert (chosen["learning_rate"] == 0.002).all()
    assert len(chosen) == 3
    assert not chosen["tuned"].any()


def test_where_nothing_reached_the_target_all_rows_stay():
    chosen = at_best_learning_rate(reaches({8: (math.nan,) * 3}))
    assert len(chosen) == 9
    assert not chosen["tuned"].any()


def test_a_table_without_rates_is_returned_untuned():
    table = reaches(TUNED).drop(columns="learning_rate")
    chosen = at_best_learning_rate(table)
    assert len(chosen) == len(table)
    assert not chosen["tuned"].any()
    assert "no learning rates" in tuning_warning(table)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (reaches({8: (100,), 32: (50,)}, rates=(0.01,)), "one and the same learning rate, 0.01"),
        (
            pd.concat([reaches({8: (9,)}, rates=(0.01,)), reaches({32: (9,)}, rates=(0.02,))]),
            "one learning rate of its own",
        ),
        (reaches({8: (300, 100, 200), 32: (90, 50, 40)}), "B = 32: the highest"),
        (reaches({8: (10, 100, 200), 32: (90, 50, 60)}), "B = 8: the lowest"),
        (reaches({8: (300, 100, 200), 32: (math.nan,) * 3}), "B = 32: no learning rate took"),
    ],
)
def test_what_was_not_tuned_is_said(table, words):
    text = tuning_warning(table)
    assert words in text
    assert text.startswith(("UNTUNED", "NOT TUNED EVERYWHERE"))
    remedy = "sweeps=learning_rate" if text.startswith("UNTUNED") else "objective=steps_to_target"
    assert remedy in text


def test_an_optimum_without_two_ends_is_said_with_its_target():
    """Seeds scatter by far more than the rates differ."""
    table = reaches({8: (110, 100, 110), 32: (200, 90, 300)})
    noisy = table["global_batch_size"] == 8
    place = (table["seed"] + table["learning_rate"].map({0.001: 0, 0.002: 1, 0.004: 2})) % 3
    table.loc[noisy, "steps_to_target"] *= place.map({0: 0.3, 1: 3.0, 2: 1.0})
    text = tuning_warning(table)
    assert "to reach a loss of 2: at B = 8: " in text
    assert "none is worse beyond the noise" in text
    assert "B = 32" not in text
    # Of two targets, that of the batches.
    both = tuning_warning(pd.concat([table, reaches(TUNED, target=1.5)]))
    assert "at B = 8 (of losses 2): " in both


def test_bad_tables_are_refused():
    with pytest.raises(AnalysisError, match="rows that repeat"):
        at_best_learning_rate(pd.concat([reaches(TUNED)] * 2))
    with pytest.raises(AnalysisError, match="needs the columns seed"):
        at_best_learning_rate(reaches(TUNED).drop(columns="seed"))


def with_cells(table):
    """Number the cells, with the columns that `cells_at_best` asks for."""
    keys = ["global_batch_size", "learning_rate"]
    return table.assign(group=0, cell=table.groupby(keys).ngroup())


def test_the_cells_of_a_target_are_those_with_the_fewest_steps():
    table = with_cells(reaches({8: (300, 100, 200), 32: (90, 50, 40)}))
    losses = with_cells(reaches({8: (1, 2, 3), 32: (1, 2, 3)}))
    finals = losses.rename(columns={"steps_to_target": "final_eval_loss"})
    # Cells are numbered by batch, then rate: the second of the first batch, the third of the other.
    assert cells_at_best(table, finals) == {1: 0.002, 5: 0.004}


def test_the_cells_of_a_batch_that_met_no_target_are_those_with_the_lowest_loss():
    none = (math.nan, math.nan, math.nan)
    table = with_cells(reaches({8: none, 32: none}))
    losses = with_cells(reaches({8: (2.5, 2.1, 2.2), 32: (2.0, 2.1, 2.3)}, seeds=(0,)))
    finals = losses.rename(columns={"steps_to_target": "final_eval_loss"})
    assert cells_at_best(table, finals) == {1: 0.002, 3: 0.001}


def test_one_rate_is_no_choice():
    table = with_cells(reaches({8: (100,), 32: (90,)}, rates=(0.002,)))
    finals = table.rename(columns={"steps_to_target": "final_eval_loss"})
    assert cells_at_best(table, finals) == {}
