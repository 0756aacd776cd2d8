"""How far a search is, by its files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchscape.errors import DamageError
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import take
from batchscape.record.overview import TrialCounts, count_trials, overview
from batchscape.record.trials import read_grid_results, write_grid_results

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
    counts = count_trials(sweep)
    assert counts == TrialCounts(3, {"b=8": 2, "b=16": 0}, grid_is_left=True)
    assert counts.left == 4
    assert count_trials(sweep.search) == counts
    # A grid of fewer trials is another's.
    # Of the two that are over one told nothing.
    for trials, is_left in ((0, True), (1, False), (2, True)):
        write_grid_results(sweep.search, ["loss"], [{"study": "b=8", "trials": trials}])
        assert count_trials(sweep) == TrialCounts(3, {"b=8": 2, "b=16": 0}, grid_is_left=is_left)


def test_no_grid_is_left_that_was_not_asked_for(sweep: SweepFolder) -> None:
    write_json(sweep.search.space, {"trials": 1, "grid_points": 0})
    assert count_trials(sweep) == TrialCounts(1, {"b=8": 2, "b=16": 0}, grid_is_left=False)
    # A study that has more than are asked for now makes up for no other.
    assert TrialCounts(1, {"b=8": 2, "b=16": 0}, grid_is_left=False).left == 1


def test_a_damaged_grid_is_not_taken_for_one_that_is_missing(sweep: SweepFolder) -> None:
    write_json(sweep.search.grid_results, {})
    assert count_trials(sweep) is None
    with pytest.raises(DamageError, match="it lacks studies"):
        read_grid_results(sweep)


def test_a_search_is_at_work_between_its_launches(sweep: SweepFolder) -> None:
    for folder in (sweep, sweep.search):
        folder.plan.write_text("run_id,planned\nr0,launch\n")
    assert overview(sweep).state == overview(sweep.search).state == "interrupted"
    lock = take(sweep.search.search_lock)
    assert lock is not None
    assert overview(sweep).state == overview(sweep.search).state == "running"
    lock.release()
    assert overview(sweep).state == "interrupted"


@pytest.mark.parametrize("damage", ["{", {"format_version": 4}, {"trials": None}, None])
def test_what_cannot_be_read_is_not_told(sweep: SweepFolder, damage: Any) -> None:
    if damage is None:
        sweep.search.space.unlink()
    elif isinstance(damage, str):
        sweep.search.space.write_text(damage)
    else:
        write_json(sweep.search.space, {"grid_points": 5, **damage})
    assert count_trials(sweep) is None
