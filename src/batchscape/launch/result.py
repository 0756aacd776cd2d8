"""What a sweep came to, run by run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from batchscape.record.status import Status

__all__ = ["RunResult", "SweepResult"]


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
    """Whether it was sealed by an earlier launch."""


@dataclass(frozen=True)
class SweepResult:
    """How all runs of a sweep stand, in the order of their launch."""

    runs: tuple[RunResult, ...]
    interrupted: bool
    """Whether a signal stopped the sweep."""
    mirror_note: str | None = None
    """What was not mirrored to the tracker, and why; None where all was, or nothing was asked."""
    mirrored: str | None = None
    """Where the tracker has the runs; None where it has none."""

    @property
    def failed(self) -> tuple[RunResult, ...]:
        """Runs that ended by a fault: `failed`, `oom`, `timeout`.

        So is `interrupted`, unless the sweep was: then somebody else stopped the run.
        """
        faults = {Status.FAILED, Status.OOM, Status.TIMEOUT}
        if not self.interrupted:
            faults.add(Status.INTERRUPTED)
        return tuple(run for run in self.runs if run.status in faults)

    @property
    def counts(self) -> dict[Status, int]:
        """Number of runs of each status that occurs."""
        found = Counter(run.status for run in self.runs)
        return {status: found[status] for status in Status if found[status]}
