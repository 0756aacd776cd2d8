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
from batchscape.record.advice import DAMAGED, UNREADABLE, advice
from batchscape.record.causes import Cause
from batchscape.record.folder import SweepFolder
from batchscape.record.progress import RunProgress, has_launcher, sweep_progress
from batchscape.record.status import Status

__all__ = ["NEXT", "STATES", "Overview", "advice_of", "by_reason", "next_of", "overview"]

STATES = {
    "running": "a launcher is at work",
    "interrupted": "no launcher is at work, and runs are left that the same command would do",
    "finished": "no run is left that the same command would do; some may have failed",
}
"""States of a sweep, and what they mean."""

NEXT = {
    "skip": "it is over",
    "wait": "it runs now; another launcher of the same command leaves it alone",
    "begin": "starts it from its first step",
    "go_on": "goes on from its newest checkpoint",
    "leave": "leaves it as it is; a fault is repeated where --retry names its status",
    "set_aside": "moves its folder to damaged/, and starts it anew",
    "reject": "lists it",
}
"""What the same command would do with a run, and what that means."""

_OPEN = {Status.PENDING, Status.INTERRUPTED}
_REPEATED = {Cause.DISK, Cause.DAMAGED_RECORDS}
"""Causes of faults that the same command repeats without being asked."""


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
    set_aside: tuple[str, ...]
    """Damaged folders of earlier attempts, in `damaged/`."""
    copies: dict[str, str]
    """Run folders that are copies of another one, or links to it, which alone counts."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of runs of each status that occurs, `damaged` and `unreadable` among them."""
        found = Counter(run.status for run in self.runs)
        order = [*map(str, Status), DAMAGED, UNREADABLE]
        return {status: found[status] for status in order if found[status]}

    @property
    def next_steps(self) -> dict[str, int]:
        """Number of runs for each thing that the same command would do."""
        found = Counter(next_of(run) for run in self.runs)
        return {step: found[step] for step in NEXT if found[step]}

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
            "set_aside": list(self.set_aside),
            "copies": self.copies,
            "runs": [_entry(run) for run in self.runs],
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
    runs: list[RunProgress] = []
    copies: dict[str, str] = {}
    if sweep.run_folders() or not planned:
        runs, copies = sweep_progress(sweep)
    known = {*copies, *(run.run_id for run in runs)}
    runs += [_pending(run_id) for run_id in planned if run_id not in known]
    at_work = has_launcher(sweep) or any(run.status == Status.RUNNING for run in runs)
    left = any(next_of(run) in {"begin", "go_on", "set_aside"} for run in runs)
    return Overview(
        sweep_dir=sweep.path,
        state="running" if at_work else "interrupted" if left else "finished",
        launchers=tuple(sorted({run.launcher for run in runs if run.launcher is not None})),
        runs=tuple(sorted(runs, key=lambda run: run.run_id)),
        set_aside=_names(sweep.damaged),
        copies=copies,
    )


def next_of(run: RunProgress) -> str:
    """Say what the same command would do with a run, a key of `NEXT`."""
    if run.status in {DAMAGED, UNREADABLE}:
        return "set_aside" if run.status == DAMAGED else "leave"
    status = Status(run.status)
    if status.is_sealed:
        return "skip"
    if status is Status.RUNNING:
        return "wait"
    if status is Status.REJECTED:
        return "reject"
    if status not in _OPEN and run.cause not in _REPEATED:
        return "leave"
    return "begin" if run.checkpoint_step is None else "go_on"


def advice_of(run: RunProgress) -> str:
    """Say what to do about a run."""
    return advice(run.status, None if run.cause is None else Cause(run.cause))


def _entry(run: RunProgress) -> dict[str, Any]:
    return {**asdict(run), "next": next_of(run), "advice": advice_of(run)}


def _planned(sweep: SweepFolder) -> list[str]:
    """Return the runs of the latest plan; none where it cannot be read, as it is derived."""
    try:
        with sweep.plan.open(newline="") as file:
            return [row["run_id"] for row in csv.DictReader(file) if row["planned"] == "launch"]
    except (OSError, ValueError, KeyError, csv.Error):
        return []


def _pending(run_id: str) -> RunProgress:
    return RunProgress(run_id, str(Status.PENDING), None, None, None, None, None)


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.name for path in folder.iterdir()))
    except OSError:
        return ()


def by_reason(runs: Iterable[RunProgress]) -> dict[str, int]:
    """Count runs by their reasons, the most frequent first."""
    return dict(Counter(run.reason or "for an unknown reason" for run in runs).most_common())
