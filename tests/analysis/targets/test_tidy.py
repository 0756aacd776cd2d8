"""Rows of steps to target that several runs share."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.targets.tidy import at_common_target


def test_a_target_that_one_run_missed_is_not_common_however_often_another_reached_it():
    runs = pd.DataFrame({"sweep_dir": "sweep", "run_id": ["a", "b"]})
    rows = [
        *[("a", 2.0, "reached")] * 2,
        ("b", 2.0, "censored"),
        ("a", 3.0, "reached"),
        ("b", 3.0, "reached"),
    ]
    reaches = pd.DataFrame(rows, columns=["run_id", "target_loss", "outcome"])
    common = at_common_target(reaches.assign(sweep_dir="sweep"), runs)
    assert common["target_loss"].tolist() == [3.0, 3.0]
