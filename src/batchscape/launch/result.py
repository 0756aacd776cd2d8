"""Results of a launch, run by run."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from batchscape.errors import RecordError
from batchscape.record.commands import LaunchedRun, time_again
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.spec import next_timing_repeat
from batchscape.record.status import FAULTS, RunStatus, Status
from batchscape.record.timing import untimed_text, why_run_untimed


@dataclass(frozen=True)
class RunResult:
    """How one run stands after the launch."""

    folder: RunFolder
    status: Status
    """`pending` where the sweep was stopped before the run's turn."""
    reason: str | None
    """The cause in words, where the run did not complete."""
    skipped: bool = False
    """Whether the run had ended in an earlier launch, and was not launched again."""
    by_another: bool = False
    """Whether another launcher ended it while this one was at work."""
    untimed_reason: str | None = None
    """Why the times of a completed run do not count."""

    @classmethod
    def of(
        cls,
        folder: RunFolder,
        status: RunStatus,
        *,
        skipped: bool = False,
        by_another: bool = False,
    ) -> RunResult:
        """Return the result of a run by its folder."""
        untimed_reason = None
        if status.status is Status.COMPLETED:
            with suppress(RecordError):
                untimed_reason = why_run_untimed(folder, status)
        return cls(folder, status.status, status.reason, skipped, by_another, untimed_reason)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.folder.path.name


@dataclass(frozen=True)
class SweepResult:
    """How all runs of a sweep stand, in the order of their launch."""

    runs: tuple[RunResult, ...]
    interrupted: bool
    """Whether a signal stopped the sweep."""
    why_stopped: str | None = None
    """Why no more runs were started, where no signal was the reason."""
    mirror_note: str | None = None
    """Which runs the tracker does not have, and why; None where it has all, or there is none."""
    mirror_place: str | None = None
    """Where the tracker has the runs; None where it has none."""

    @property
    def failed(self) -> tuple[RunResult, ...]:
        """Runs that ended by a fault: `failed`, `oom`, `timeout`.

        `interrupted` is one as well, unless the sweep was interrupted.
        """
        faults = FAULTS if self.interrupted else FAULTS | {Status.INTERRUPTED}
        return tuple(run for run in self.runs if run.status in faults)

    @property
    def counts(self) -> dict[Status, int]:
        """Number of runs of each status that occurs."""
        counts = Counter(run.status for run in self.runs)
        return {status: counts[status] for status in Status if counts[status]}

    def untimed_text(self, sweep: SweepFolder, command: str) -> str | None:
        """Say how many completed runs have no valid times, why, and which command times them again.

        Parameters
        ----------
        sweep : SweepFolder
        command : str
            The command of this launch, as `record.commands.command_of` returns it.

        Returns
        -------
        str or None
            None where all times are valid.
        """
        reasons = Counter(run.untimed_reason for run in self.runs if run.untimed_reason is not None)
        if not reasons:
            return None
        completed = sum(run.status is Status.COMPLETED for run in self.runs)
        text = f"{untimed_text(reasons, completed)}."
        folder = str(sweep.path)
        time_command = time_again(
            (LaunchedRun(folder, command, reason) for reason in reasons),
            {folder: next_timing_repeat(sweep)},
        )
        advice = "On a free machine, with a core or device for each rank, this measures them"
        return f"{text} {advice}: {time_command}" if time_command else text
