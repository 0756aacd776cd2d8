"""How far a search is, by its files; no table is loaded."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass

from batchscape.errors import RecordError
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder

__all__ = ["TrialCounts", "count_trials"]


@dataclass(frozen=True)
class TrialCounts:
    """How far the trials of a search are."""

    asked: int
    """Trials that each study is to have, by the latest command."""
    done: dict[str, int]
    """Trials that are over, by study, whatever they came to."""
    grid_is_left: bool
    """Whether a grid is to be measured around the best, and nothing of it was begun."""

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
        has_best = any(row["is_best"] == "True" for row in rows)
        grid_is_begun = SweepFolder(search.path.parent).runs.exists()
        return TrialCounts(
            asked=space["trials"],
            done=dict(done),
            grid_is_left=has_best and space["grid_points"] > 0 and not grid_is_begun,
        )
    except (OSError, ValueError, KeyError, csv.Error, RecordError):
        return None
