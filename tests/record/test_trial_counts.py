"""How far a search is, by its files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.trial_counts import TrialCounts, count_trials

HEAD = "study,trial,rate,loss,outcome,is_best,runs,reason\n"


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    """Three trials a study: of one two are over, one of them by a fault, of the other none."""
    sweep = SweepFolder(tmp_path)
    write_json(sweep.search.space, {"trials": 3, "grid_points": 5})
    sweep.search.trials.write_text(
        f"{HEAD}b=8,0,0.1,2.5,completed,True,r0,\nb=8,1,0.2,,failed,False,,killed\n"
        "b=8,2,0.3,,,False,,\nb=16,0,0.1,,,False,,\n"
    )
    return sweep


def test_trials_that_are_over_are_counted_by_study(sweep: SweepFolder) -> None:
    found = count_trials(sweep)
    assert found == TrialCounts(3, {"b=8": 2, "b=16": 0}, grid_is_left=True)
    assert found.left == 4
    assert count_trials(sweep.search) == found
    sweep.runs.mkdir()
    assert count_trials(sweep) == TrialCounts(3, {"b=8": 2, "b=16": 0}, grid_is_left=False)


def test_no_grid_is_left_that_was_not_asked_for(sweep: SweepFolder) -> None:
    write_json(sweep.search.space, {"trials": 1, "grid_points": 0})
    assert count_trials(sweep) == TrialCounts(1, {"b=8": 2, "b=16": 0}, grid_is_left=False)
    # A study that has more than are asked for now makes up for no other.
    assert TrialCounts(1, {"b=8": 2, "b=16": 0}, grid_is_left=False).left == 1


@pytest.mark.parametrize("damage", ["{", '{"format_version": 3}', None])
def test_what_cannot_be_read_is_not_told(sweep: SweepFolder, damage: str | None) -> None:
    if damage is None:
        sweep.search.space.unlink()
    else:
        sweep.search.space.write_text(damage)
    assert count_trials(sweep) is None
