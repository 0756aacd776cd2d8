"""What the same command does next with a run: the one decision of launchers and of `status`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from batchscape.errors import RecordError
from batchscape.record.files import last_row
from batchscape.record.folder import RunFolder
from batchscape.record.outcome import Outcome, decide
from batchscape.record.status import FAULTS, RunStatus, Status

__all__ = ["Next", "final_outcomes", "goes_on", "is_tried_again", "what_next"]


class Next(StrEnum):
    """What the same command does with a run."""

    SKIP = "skip"
    """It is over."""
    WAIT = "wait"
    """It runs now: another launcher of the same command leaves it alone."""
    SEAL = "seal"
    """It was trained to its end, and only this could not be written: seals it from its rows."""
    BEGIN = "begin"
    """Starts it from its first step."""
    GO_ON = "go_on"
    """Goes on from its newest checkpoint; or starts a program that goes on by itself."""
    LEAVE = "leave"
    """Leaves it as it is; a fault is repeated where `--retry` names its status."""
    REJECT = "reject"
    """Lists it."""

    @property
    def is_work(self) -> bool:
        """Whether the same command would do anything."""
        return self in {Next.SEAL, Next.BEGIN, Next.GO_ON}


def what_next(
    folder: RunFolder,
    status: RunStatus,
    processes: int,
    *,
    resumable: bool,
    is_held: bool,
    retry: Collection[Status] = (),
) -> Next:
    """Decide what happens next with a run whose folder is whole.

    Parameters
    ----------
    folder : RunFolder
    status : RunStatus
        As it stands in the folder.
    processes : int
        Those of the run that leave an outcome each.
    resumable : bool
        Whether it is a program of the user's own that goes on by itself when it is started again.
    is_held : bool
        Whether somebody else has the lock of the run.
    retry : collection of Status
        Faults that are repeated.
    """
    if status.status.is_sealed:
        return Next.SKIP
    if is_held:
        return Next.WAIT
    if status.status is Status.REJECTED:
        return Next.REJECT
    if status.attempts and final_outcomes(folder, processes) is not None:
        return Next.SEAL
    if status.status in FAULTS and status.status not in retry:
        return Next.LEAVE
    return Next.GO_ON if goes_on(folder, status, resumable=resumable) else Next.BEGIN


def goes_on(folder: RunFolder, status: RunStatus, *, resumable: bool) -> bool:
    """Return whether another attempt goes on; else ranks drop the rows, and begin again."""
    return (resumable and bool(status.attempts)) or folder.checkpoint_step is not None


def final_outcomes(folder: RunFolder, processes: int) -> Mapping[int, Outcome] | None:
    """Return what the ranks of a run left that was trained to its end; None where it was not.

    Parameters
    ----------
    folder : RunFolder
    processes : int
        Those of the run that leave an outcome each.

    Returns
    -------
    mapping of int to Outcome, or None
        None unless the ranks of the latest attempt agree on a final end, and the rows of all steps
        are there.
    """
    outcomes: dict[int, Outcome] = {}
    try:
        for rank in range(processes):
            outcome = Outcome.read(folder, rank)
            if outcome is None:
                return None
            outcomes[rank] = outcome
        done = last_row(folder.lines("steps")).get("optimizer_step", 0)
    except RecordError:
        return None
    if any(outcome.optimizer_step != done for outcome in outcomes.values()):
        return None
    return outcomes if decide(processes, outcomes, {}).status.is_sealed else None


def is_tried_again(status: RunStatus, retries_left: int) -> bool:
    """Return whether the launch that saw a run end tries it again, from its newest checkpoint.

    It does where the machine may have ended the run: a hang, a rank that was killed, crashed or
    lost its connection, a fork server that died. What the same run would meet again is not tried
    again: an exception, memory that is out, divergence, a time limit, damaged records.
    """
    if status.status is not Status.FAILED or status.cause is None:
        return False
    return retries_left > 0 and status.cause.is_of_the_machine
