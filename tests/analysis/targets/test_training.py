"""What training losses say, against curves whose rises and losses are known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis.targets.training import at_equal_loss, largest_rises


def curves(losses: dict[str, list[float]], name: str, every: int = 10) -> pd.DataFrame:
    return pd.concat(
        pd.DataFrame(
            {
                "run": run,
                "samples": every * np.arange(1, len(losses_of_run) + 1),
                name: losses_of_run,
            }
        )
        for run, losses_of_run in losses.items()
    )


def test_a_rise_is_above_the_lowest_so_far_and_a_share_of_the_start():
    losses = {"up": [4.0, 1.0, np.nan, 2.5, 1.5, 0.5], "down": [2.0, 1.9, 1.8, 1.7, 1.6, 1.5]}
    batch = pd.Series({"up": 10, "down": 10, "silent": 10})
    rises = largest_rises(curves(losses, "loss"), batch, pd.Index(["up", "down"]))
    assert rises["up"] == pytest.approx(1.5 / 3)
    assert rises["down"] == 0
    assert np.isnan(rises["silent"])


def test_an_infinite_loss_counts_as_little_as_a_missing_one():
    """Neither in the first window, which scales all, nor in a later one, which would rise."""
    batch = pd.Series({"up": 10, "down": 10})
    rises = [
        largest_rises(
            curves({"up": [4.0, 1.0, lost, 2.5, 1.5], "down": [2.0, 2.0, 1.8, lost, 1.5]}, "loss"),
            *(batch, batch.index),
        )
        for lost in (np.nan, np.inf, -np.inf)
    ]
    assert rises[0]["up"] == pytest.approx(1.5 / 3)
    for other in rises[1:]:
        pd.testing.assert_series_equal(other, rises[0])
    starting = curves({"up": [np.inf, 2.0, 1.0, 2.5], "down": [2.0, 2.0, 1.8, 1.5]}, "loss")
    assert largest_rises(starting, batch, batch.index)["up"] == pytest.approx(1.5 / 2)


def test_held_out_losses_are_compared_where_training_losses_are_equal():
    """Both fall along a line; one starts lower, and is 0.5 worse when held out."""
    steps = np.arange(1, 101)
    one, other = 3 - steps / 50, 2.5 - steps / 50
    losses = {"one": one.tolist(), "other": other.tolist()}
    held_out = {"one": one[9::10].tolist(), "other": (other[9::10] + 0.5).tolist()}
    comparison = at_equal_loss(
        curves(losses, "loss"), curves(held_out, "eval_loss", 100), pd.Index(["one", "other"])
    )
    assert comparison is not None
    level, at_level = comparison
    assert at_level["other"] - at_level["one"] == pytest.approx(0.5)
    assert at_level["one"] == pytest.approx(level, abs=0.03)


def test_too_few_evaluations_compare_nothing():
    steps = curves({"one": [3.0, 2.0, 1.0]}, "loss")
    evals = curves({"one": [3.0, 2.0]}, "eval_loss")
    assert at_equal_loss(steps, evals, pd.Index(["one"])) is None
