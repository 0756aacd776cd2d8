"""What to do about a run, in one line for each status and cause."""

from __future__ import annotations

from batchscape.record.causes import Cause
from batchscape.record.state import UNREADABLE
from batchscape.record.status import Status

__all__ = [
    "CAUSE_ADVICE",
    "SEAL_ADVICE",
    "STATUS_ADVICE",
    "UNREADABLE_ADVICE",
    "advice",
]

UNREADABLE_ADVICE = (
    "mend what the reason says, use the version of batchscape that wrote it, or delete the folder "
    "to run it again"
)
SEAL_ADVICE = "nothing: it was trained to its end, and the same command seals it from its rows"
"""Of a run that lacks nothing but its seal, whatever its status says."""

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
"""By status; of a run that ended by a fault, `CAUSE_ADVICE` says more."""

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
"""By cause."""


_NOT_LAUNCHED = (
    "use a smaller micro-batch with more accumulation, which trains alike; to try it all the same: "
    "launcher.skip_unfit=false"
)
"""What to do about a run that was rejected because it cannot fit."""


def advice(status: Status | str, cause: Cause | None = None) -> str:
    """Return what to do about a run.

    Parameters
    ----------
    status : Status or str
        Or `UNREADABLE`.
    cause : Cause, optional
        What ended it; None where it has not ended, or completed.

    Returns
    -------
    str
        One line.
    """
    if status == UNREADABLE:
        return UNREADABLE_ADVICE
    status = Status(status)
    if status is Status.REJECTED and cause is Cause.OUT_OF_MEMORY:
        return _NOT_LAUNCHED
    is_over = status not in {Status.PENDING, Status.RUNNING, Status.COMPLETED, Status.REJECTED}
    if is_over and cause is not None:
        return CAUSE_ADVICE[cause]
    return STATUS_ADVICE[status]
