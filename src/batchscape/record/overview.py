"""How a whole sweep stands: what was done, what runs, what failed, and what comes next."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchscape.outgoing import outgoing_json
from batchscape.record.advice import SEAL_ADVICE, advice
from batchscape.record.causes import Cause
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import is_held
from batchscape.record.progress import RunProgress, sweep_progress
from batchscape.record.state import UNREADABLE, Next
from batchscape.record.status import Status
from batchscape.record.trial_counts import TrialCounts, count_trials

__all__ = ["STATES", "Overview", "advice_of", "by_reason", "overview"]

STATES = {
    "running": "a launcher is at work",
    "interrupted": "no launcher is at work, and the same command would do what is left",
    "finished": "no run is left that the same command would do; some may have failed",
}
"""States of a sweep, and what they mean."""


@dataclass(frozen=True)
class Overview:
    """A sweep, at a glance."""

    sweep_dir: Path
    state: str
    """One of `STATES`."""
    launchers: tuple[str, ...]
    """The launchers that have runs now: process ids and machines."""
    runs: tuple[RunProgress, ...]
    """By name; those that the latest plan has and no folder are pending."""
    trials: TrialCounts | None = None
    """Of a search, whether the runs are its trials' or its grid's."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of runs of each status that occurs, `unreadable` among them."""
        found = Counter(run.status for run in self.runs)
        order = [*map(str, Status), UNREADABLE]
        return {status: found[status] for status in order if found[status]}

    @property
    def next_steps(self) -> dict[str, int]:
        """Number of runs for each thing that the same command would do."""
        found = Counter(run.next for run in self.runs)
        return {str(step): found[step] for step in Next if found[step]}

    def with_status(self, *statuses: str) -> list[RunProgress]:
        """Return the runs of some statuses."""
        return [run for run in self.runs if run.status in statuses]

    def as_json(self) -> str:
        """Return all of it as JSON; docs/statuses.md says what each name means."""
        content: dict[str, Any] = {
            "sweep_dir": str(self.sweep_dir),
            "state": self.state,
            "launchers": list(self.launchers),
            "counts": self.counts,
            "next": self.next_steps,
            "trials": None if self.trials is None else asdict(self.trials),
            "runs": [{**asdict(run), "advice": advice_of(run)} for run in self.runs],
        }
        return json.dumps(outgoing_json(content), indent=2, allow_nan=False)


def overview(sweep: SweepFolder) -> Overview:
    """Read how a sweep stands; no table is loaded.

    Raises
    ------
    RecordError
        If the folder is no sweep.
    """
    planned = _planned(sweep)
    runs = sweep_progress(sweep) if sweep.run_folders() or not planned else []
    known = {run.run_id for run in runs}
    runs += [RunProgress(name, str(Status.PENDING)) for name in planned if name not in known]
    # A search works between its launches too, and on its trials in a folder of their own.
    locks = (sweep.lock, sweep.search.search_lock, sweep.search_lock)
    at_work = any(map(is_held, locks)) or any(run.status == Status.RUNNING for run in runs)
    trials = count_trials(sweep)
    is_searching = trials is not None and (trials.left or trials.grid_is_left)
    left = is_searching or any(run.next.is_work for run in runs)
    return Overview(
        sweep_dir=sweep.path,
        state="running" if at_work else "interrupted" if left else "finished",
        launchers=tuple(sorted({run.launcher for run in runs if run.launcher is not None})),
        runs=tuple(sorted(runs, key=lambda run: run.run_id)),
        trials=trials,
    )


def advice_of(run: RunProgress) -> str:
    """Say what to do about a run."""
    if run.next is Next.SEAL:
        return SEAL_ADVICE
    return advice(run.status, None if run.cause is None else Cause(run.cause))


def _planned(sweep: SweepFolder) -> list[str]:
    """Return the runs of the latest plan; none where it cannot be read, as it is derived."""
    try:
        with sweep.plan.open(newline="") as file:
            return [row["run_id"] for row in csv.DictReader(file) if row["planned"] == "launch"]
    except (OSError, ValueError, KeyError, csv.Error):
        return []


def by_reason(runs: Iterable[RunProgress]) -> dict[str, int]:
    """Count runs by their reasons, the most frequent first."""
    return dict(Counter(run.reason or "for an unknown reason" for run in runs).most_common())
