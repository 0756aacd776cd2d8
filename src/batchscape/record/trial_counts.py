"""The progress of a search, by its files; no table is loaded."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass

from batchscape.errors import RecordError
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.status import FAULTS, Status

FAILED_TRIALS = FAULTS - {Status.OOM}
"""Outcomes of trials without a result, which may be run again; out of memory is a result."""


@dataclass(frozen=True)
class TrialCounts:
    """Progress of the trials of a search."""

    asked: int
    """Number of trials for each study, by the latest command."""
    done: dict[str, int]
    """Number of trials that are over, by study, whatever their outcomes."""
    grid_is_left: bool
    """Whether a grid is to be measured around the best, and is not over."""

    @property
    def left(self) -> int:
        """Number of trials that are not over, or not begun."""
        return sum(max(0, self.asked - done) for done in self.done.values())

    @property
    def is_unfinished(self) -> bool:
        """Whether trials are left, or the grid around the best is."""
        return self.left > 0 or self.grid_is_left


def count_trials(sweep: SweepFolder) -> TrialCounts | None:
    """Count the trials of a search; None where there is none, or its files cannot be read.

    Parameters
    ----------
    sweep : SweepFolder
        Of the grid, or of the trials.
    """
    search = sweep if sweep.space.exists() else sweep.search
    try:
        space = read_json(search.space)
        with search.trials.open(newline="") as file:
            rows = list(csv.DictReader(file))
        done = Counter({row["study"]: 0 for row in rows})
        done.update(row["study"] for row in rows if row["outcome"])
        # A grid belongs to a number of trials: where there are more, another grid follows.
        grids = read_json(search.grid_results)["studies"] if search.grid_results.exists() else []
        trials_by_study = {study["study"]: study["trials"] for study in grids}
        studies_with_best = {row["study"] for row in rows if row["is_best"] == "True"}
        outcomes = [(row["study"], row["outcome"]) for row in rows if row["outcome"]]
        valid_trials = Counter(study for study, outcome in outcomes if outcome not in FAILED_TRIALS)
        return TrialCounts(
            asked=int(space["trials"]),
            done=dict(done),
            grid_is_left=int(space["grid_points"]) > 0
            and any(
                trials_by_study.get(study) != valid_trials[study] for study in studies_with_best
            ),
        )
    except (OSError, ValueError, TypeError, KeyError, csv.Error, RecordError):
        return None
