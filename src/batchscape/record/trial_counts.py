"""How far a search is, by its files; no table is loaded."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass

from batchscape.errors import RecordError
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.status import FAULTS, Status

UNTOLD = FAULTS - {Status.OOM}
"""Outcomes of trials that told nothing and may be run again; out of memory is told."""


@dataclass(frozen=True)
class TrialCounts:
    """How far the trials of a search are."""

    asked: int
    """Trials that each study is to have, by the latest command."""
    done: dict[str, int]
    """Trials that are over, by study, whatever they came to."""
    grid_is_left: bool
    """Whether a grid is to be measured around the best, and is not over."""

    @property
    def left(self) -> int:
        """Trials that are not over, or not begun."""
        return sum(max(0, self.asked - done) for done in self.done.values())


def count_trials(sweep: SweepFolder) -> TrialCounts | None:
    """Count the trials of a search; None where there is none, or where that cannot be read.

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
        # A grid is of the trials that were there: where there are more, another is to come.
        grids = read_json(search.measured)["studies"] if search.measured.exists() else []
        measured = {study["study"]: study["trials"] for study in grids}
        with_best = {row["study"] for row in rows if row["is_best"] == "True"}
        told = Counter(r["study"] for r in rows if r["outcome"] and r["outcome"] not in UNTOLD)
        return TrialCounts(
            asked=int(space["trials"]),
            done=dict(done),
            grid_is_left=int(space["grid_points"]) > 0
            and any(measured.get(study) != told[study] for study in with_best),
        )
    except (OSError, ValueError, TypeError, KeyError, csv.Error, RecordError):
        return None
