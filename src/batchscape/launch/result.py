"""What a sweep came to, run by run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from batchscape.record.folder import RunFolder
from batchscape.record.status import RunStatus, Status

__all__ = ["FAULTS", "RunResult", "SweepResult"]

FAULTS = frozenset({Status.FAILED, Status.OOM, Status.TIMEOUT})
"""Statuses of a run that ended by a fault: they are repeated only where that is asked for."""


@dataclass(frozen=True)
class RunResult:
    """How one run stands after the launch."""

    run_id: str
    status: Status
    """`pending` where the sweep was stopped before the run's turn."""
    reason: str | None
    """The cause in words, where it did not complete."""
    log: Path
    """What its processes printed."""
    skipped: bool = False
    """Whether it had ended in an earlier launch, and was not launched again."""
    by_another: bool = False
    """Whether another launcher ended it while this one was at work."""

    @classmethod
    def of(
        cls,
        folder: RunFolder,
        status: RunStatus,
        *,
        skipped: bool = False,
        by_another: bool = False,
    ) -> RunResult:
        """Return how a run stands by its folder."""
        name = folder.path.name
        return cls(name, status.status, status.reason, folder.log, skipped, by_another)


@dataclass(frozen=True)
class SweepResult:
    """How all runs of a sweep stand, in the order of their launch."""

    runs: tuple[RunResult, ...]
    interrupted: bool
    """Whether a signal stopped the sweep."""
    stopped: str | None = None
    """Why no more runs were started before the end, where that was no signal."""
    mirror_note: str | None = None
    """What was not mirrored to the tracker, and why; None where all was, or nothing was asked."""
    mirrored: str | None = None
    """Where the tracker has the runs; None where it has none."""

    @property
    def failed(self) -> tuple[RunResult, ...]:
        """Runs that ended by a fault: `failed`, `oom`, `timeout`.

        So is `interrupted`, unless the sweep was: then somebody else stopped the run.
        """
        faults = FAULTS if self.interrupted else FAULTS | {Status.INTERRUPTED}
        return tuple(run for run in self.runs if run.status in faults)

    @property
    def counts(self) -> dict[Status, int]:
        """Number of runs of each status that occurs."""
        found = Counter(run.status for run in self.runs)
        return {status: found[status] for status in Status if found[status]}
