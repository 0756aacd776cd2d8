"""The state of a whole sweep: what is done, what runs, what failed, and what to do next."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchscape.outgoing import outgoing_json
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import is_held
from batchscape.record.progress import RunProgress, sweep_progress
from batchscape.record.state import UNREADABLE, Next, is_rejected_by_plan
from batchscape.record.status import Cause, Status
from batchscape.record.trial_counts import TrialCounts, count_trials

UNREADABLE_ADVICE = (
    "mend what the reason says, use the version of batchscape that wrote it, or delete the folder "
    "to run it again"
)
SEAL_ADVICE = "nothing: it was trained to its end, and the same command seals it from its rows"
"""Advice on a run that lacks only its seal, whatever its status."""

STATUS_ADVICE: dict[Status, str] = {
    Status.PENDING: "nothing: the same command starts it",
    Status.RUNNING: "wait; Ctrl-C in its launcher stops it with a checkpoint",
    Status.COMPLETED: "nothing: it is sealed, and the same command skips it",
    Status.OOM: "use a smaller micro-batch with more accumulation, which trains alike, or "
    "activation checkpointing; to try the same again: --retry oom",
    Status.DIVERGED: "nothing: it is a result; lower the learning rate for another one",
    Status.TIMEOUT: "raise launcher.timeout_s and add --retry timeout; it goes on from its "
    "checkpoint",
    Status.FAILED: "read the end of its log.txt, mend what it says, and add --retry failed",
    Status.INTERRUPTED: "nothing: the same command goes on with it",
    Status.PRUNED: "nothing: a stated rule cut it, and its targets are bounds",
    Status.REJECTED: "choose one of the geometries that its reason names",
}
"""Advice by status; of a run that ended by a fault, `CAUSE_ADVICE` says more."""

CAUSE_ADVICE: dict[Cause, str] = {
    Cause.OUT_OF_MEMORY: STATUS_ADVICE[Status.OOM],
    Cause.OTHER_MEMORY: "make room where its reason says that memory was out: end what others run "
    "on the device (nvidia-smi), or leave more to the host (fewer loader.workers); "
    "add --retry failed",
    Cause.DIVERGENCE: STATUS_ADVICE[Status.DIVERGED],
    Cause.HANG: "read the stacks of all ranks in its log.txt; where it is only that slow, raise "
    "launcher.hang_s; add --retry failed",
    Cause.TIME_LIMIT: STATUS_ADVICE[Status.TIMEOUT],
    Cause.EXCEPTION: STATUS_ADVICE[Status.FAILED],
    Cause.SIGNAL: "a native library crashed: read the stack in its log.txt; add --retry failed",
    Cause.KILLED: "mostly memory: look into the system's log (dmesg), run fewer at a time or with "
    "smaller micro-batches; add --retry failed",
    Cause.LOST_CONNECTION: "look at what the other ranks logged; add --retry failed",
    Cause.INFRASTRUCTURE: "look at the machine (limits of processes, file systems); add "
    "--retry failed",
    Cause.DISK: "make room on the disk, or lift what forbids writing; the same command goes on",
    Cause.INTERRUPTED: STATUS_ADVICE[Status.INTERRUPTED],
    Cause.DAMAGED_RECORDS: "mend what its reason says, and add --retry failed; where its rows are "
    "damaged, delete its folder to run it again",
    Cause.CONTRADICTION: "compare what the reason says with the settings or the command, mend it, "
    "and add --retry failed",
}
"""Advice by cause."""


_NOT_LAUNCHED = (
    "use a smaller micro-batch with more accumulation, which trains alike; to try it all the same: "
    "launcher.skip_unfit=false"
)
"""Advice on a run that was rejected because it cannot fit."""


def advice(status: Status | str, cause: Cause | None = None) -> str:
    """Return what to do about a run.

    Parameters
    ----------
    status : Status or str
        Or `UNREADABLE`.
    cause : Cause, optional
        Cause of its end; None where it has not ended, or completed.

    Returns
    -------
    str
        One line.
    """
    if status == UNREADABLE:
        return UNREADABLE_ADVICE
    status = Status(status)
    if status is Status.REJECTED and not is_rejected_by_plan(status, cause):
        return _NOT_LAUNCHED
    if status.ended_after_launch and status is not Status.COMPLETED and cause is not None:
        return CAUSE_ADVICE[cause]
    return STATUS_ADVICE[status]


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
    """Process ids and machines of the launchers that have runs now."""
    runs: tuple[RunProgress, ...]
    """By name; runs of the latest plan without a folder are pending."""
    trials: TrialCounts | None = None
    """Counts of the search that the sweep belongs to, as its trials or as its grid."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of runs of each status that occurs, `unreadable` among them."""
        counts = Counter(run.status for run in self.runs)
        order = [*map(str, Status), UNREADABLE]
        return {status: counts[status] for status in order if counts[status]}

    @property
    def next_steps(self) -> dict[str, int]:
        """Number of runs for each next step of the same command."""
        counts = Counter(run.next for run in self.runs)
        return {str(step): counts[step] for step in Next if counts[step]}

    def with_status(self, *statuses: str) -> list[RunProgress]:
        """Return the runs of some statuses."""
        return [run for run in self.runs if run.status in statuses]

    def as_json(self) -> str:
        """Return the overview as JSON; docs/statuses.md says what each name means."""
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
    """Read the state of a sweep; no table is loaded.

    Raises
    ------
    RecordError
        If the folder is no sweep.
    """
    try:
        with sweep.plan.open(newline="") as file:
            rows = list(csv.DictReader(file))
        planned = [row["run_id"] for row in rows if row["planned"] == "launch"]
    except (OSError, ValueError, KeyError, csv.Error):
        planned = []  # the plan is derived: a damaged one counts for nothing
    runs = sweep_progress(sweep) if sweep.run_folders() or not planned else []
    names = {run.run_id for run in runs}
    runs += [RunProgress(name, str(Status.PENDING)) for name in planned if name not in names]
    # A search works between its launches too, and on its trials in another folder.
    locks = (sweep.lock, sweep.search.search_lock, sweep.search_lock)
    at_work = any(map(is_held, locks)) or any(run.status == Status.RUNNING for run in runs)
    trials = count_trials(sweep)
    is_searching = trials is not None and (trials.left or trials.grid_is_left)
    is_unfinished = is_searching or any(run.next.is_work for run in runs)
    return Overview(
        sweep_dir=sweep.path,
        state="running" if at_work else "interrupted" if is_unfinished else "finished",
        launchers=tuple(sorted({run.launcher for run in runs if run.launcher is not None})),
        runs=tuple(sorted(runs, key=lambda run: run.run_id)),
        trials=trials,
    )


def advice_of(run: RunProgress) -> str:
    """Return the advice on a run."""
    if run.next is Next.SEAL:
        return SEAL_ADVICE
    return advice(run.status, None if run.cause is None else Cause(run.cause))
