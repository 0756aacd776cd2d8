"""The outcome of a rank, and the end of a run, which is decided by the outcomes of its ranks.

`Outcome` is the content of `outcome-<rank>.json`, which a rank writes and the launcher reads;
`RankExit` is the end of a rank's process, as its parent saw it. `decide` is pure: it reads no
clock, no process and no file.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from batchscape.errors import DamageError
from batchscape.outgoing import redact
from batchscape.record.causes import Cause
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import RunFolder
from batchscape.record.instants import now
from batchscape.record.status import Status, StopReason
from batchscape.text import count_text

SIGNAL_LAG_S = 0.5
"""A process that dies by a signal closes its connections before the system reports its death, so
that its peers may complain first. The death counts as this much earlier than it was noticed."""

_CAUSES = {
    Status.OOM: Cause.OUT_OF_MEMORY,
    Status.DIVERGED: Cause.DIVERGENCE,
    Status.TIMEOUT: Cause.TIME_LIMIT,
    Status.FAILED: Cause.EXCEPTION,
    Status.INTERRUPTED: Cause.INTERRUPTED,
}
"""Cause that follows from a status, where the outcome names none."""


@dataclass(frozen=True)
class Outcome:
    """How the training ended on one rank, as the rank reports it."""

    status: Status
    optimizer_step: int
    """Optimizer steps done."""
    stop_reason: StopReason | None = None
    reason: str | None = None
    cause: Cause | None = None
    """Cause of its end, where it did not complete."""
    phase: str | None = None
    """What the rank was doing, a phase of `record.heartbeat`."""
    peak_memory_gib: float | None = None
    """Peak of a rank that ran out of memory."""
    peak_memory_method: str | None = None
    at: float = field(default_factory=now)
    """Seconds since the epoch, by `record.instants`."""

    def write(self, folder: RunFolder, rank: int) -> None:
        """Write the outcome of a rank.

        Raises
        ------
        DiskError
            If the disk takes no more.
        """
        reason = None if self.reason is None else redact(self.reason)
        write_json(folder.outcome(rank), {**asdict(self), "reason": reason})

    @classmethod
    def read(cls, folder: RunFolder, rank: int) -> Outcome | None:
        """Read the outcome of a rank; None where there is none.

        Raises
        ------
        RecordError
            If the file is damaged.
        """
        path = folder.outcome(rank)
        if not path.exists():
            return None
        content = read_json(path)
        try:
            stop_reason, cause = content.pop("stop_reason"), content.pop("cause")
            return cls(
                status=Status(content.pop("status")),
                stop_reason=None if stop_reason is None else StopReason(stop_reason),
                cause=None if cause is None else Cause(cause),
                **content,
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path} is damaged: {error}"
            raise DamageError(msg) from None


@dataclass(frozen=True)
class RankExit:
    """One rank's process has ended."""

    run: str
    rank: int
    code: int
    """Exit code; negative: the signal that killed it."""
    at: float
    """When it was noticed, in seconds since the epoch."""
    lost: str | None = None
    """Why it ended, where it is not the cause: its server died, or it could not be forked."""


@dataclass(frozen=True)
class Stop:
    """The launcher asked a run to end."""

    status: Status
    """`interrupted`, `timeout`, or `failed` for a run that hangs at its end."""
    reason: str
    at: float
    """Seconds since the epoch."""
    cause: Cause
    rank: int | None = None
    """The rank that caused the stop, where one did."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    status: Status
    stop_reason: StopReason | None = None
    reason: str | None = None
    rank: int | None = None
    """The rank that raised the cause, where one did."""
    cause: Cause | None = None
    phase: str | None = None
    """What that rank was doing, as it reported."""
    peak_memory_gib: float | None = None
    peak_memory_method: str | None = None


def decide(
    ranks: int,
    outcomes: Mapping[int, Outcome],
    exits: Mapping[int, RankExit],
    stop: Stop | None = None,
    last_words: str | None = None,
    *,
    killed_at: float | None = None,
    oom_kills: int = 0,
    device_type: str = "cpu",
) -> RunEnd:
    """Decide how a run ended: by its earliest cause, of which the others are consequences.

    Parameters
    ----------
    ranks : int
        Ranks of the run.
    outcomes : mapping of int to Outcome
        By rank; a rank that died has left none.
    exits : mapping of int to RankExit
        By rank, all of them.
    stop : Stop, optional
        The launcher's own reason for ending the run.
    last_words : str, optional
        Last line of the log, shown for a rank without an outcome.
    killed_at : float, optional
        When the launcher killed the ranks, in seconds since the epoch: later SIGKILLs are its own.
    oom_kills : int
        Kills by the system's out-of-memory killer that the cgroup has counted during the run.
    device_type : str
        Of the run. The out-of-memory killer watches the memory of the host, which CPU ranks use.

    Returns
    -------
    RunEnd
        `completed` only if every rank reports it. Otherwise the earliest cause decides: an outcome
        that is not `completed`, a rank without an outcome, or the stop. A lost connection decides
        only where there is no other cause.
    """
    unfinished = {r: o for r, o in outcomes.items() if o.status is not Status.COMPLETED}
    if len(outcomes) == ranks and not unfinished:
        return _end_completed(outcomes)
    causes = [(end.at, end.at, _end_by_outcome(end, rank)) for rank, end in unfinished.items()]
    deaths = [ended for rank, ended in exits.items() if rank not in outcomes]
    unkilled = [
        ended
        for ended in deaths
        if killed_at is None or ended.code != -signal.SIGKILL or ended.at < killed_at
    ]
    causes += [
        (
            ended.at,
            ended.at - (SIGNAL_LAG_S if ended.code < 0 else 0),
            _end_by_death(ended, last_words),
        )
        for ended in (unkilled if unkilled or unfinished else deaths)
    ]
    if stop is not None:
        # Causes after the stop are its effects, mostly deaths by the launcher's signals.
        causes = [cause for cause in causes if cause[0] < stop.at]
        if not causes:
            return RunEnd(stop.status, reason=stop.reason, rank=stop.rank, cause=stop.cause)
    first = min(causes, key=lambda cause: (cause[2].cause is Cause.LOST_CONNECTION, cause[1]))[2]
    return _add_oom_kills(first, oom_kills, device_type)


def _end_completed(outcomes: Mapping[int, Outcome]) -> RunEnd:
    reasons = {rank: outcome.stop_reason for rank, outcome in outcomes.items()}
    if len(set(reasons.values())) > 1:
        listed = ", ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
        reason = f"the ranks stopped for different reasons ({listed})"
        return RunEnd(Status.FAILED, reason=reason, cause=Cause.CONTRADICTION)
    return RunEnd(Status.COMPLETED, stop_reason=reasons[0], reason=outcomes[0].reason)


def _end_by_outcome(outcome: Outcome, rank: int) -> RunEnd:
    """Return the end that the outcome of a rank reports."""
    return RunEnd(
        outcome.status,
        reason=outcome.reason,
        rank=rank,
        cause=outcome.cause or _CAUSES.get(outcome.status),
        phase=outcome.phase,
        peak_memory_gib=outcome.peak_memory_gib,
        peak_memory_method=outcome.peak_memory_method,
    )


def _end_by_death(ended: RankExit, last_words: str | None) -> RunEnd:
    """Return the end of a rank that left no outcome."""
    who = f"rank {ended.rank}"
    if ended.lost is not None:
        return RunEnd(Status.FAILED, reason=ended.lost, cause=Cause.INFRASTRUCTURE)
    if ended.code == -signal.SIGKILL:
        reason = killed_by(who, signal.SIGKILL)
        return RunEnd(Status.FAILED, reason=reason, rank=ended.rank, cause=Cause.KILLED)
    if ended.code < 0:
        reason, cause = killed_by(who, -ended.code), Cause.SIGNAL
    else:
        reason = f"{who} left no outcome and exited with code {ended.code}"
        cause = Cause.EXCEPTION
    if last_words is not None:
        reason = f"{reason}; its log ends: {last_words}"
    return RunEnd(Status.FAILED, reason=reason, rank=ended.rank, cause=cause)


def _add_oom_kills(run_end: RunEnd, oom_kills: int, device_type: str) -> RunEnd:
    """Add to the end of a killed process whether the system counted it as out of memory."""
    if run_end.cause is not Cause.KILLED:
        return run_end
    if not oom_kills:
        reason = f"killed, probably out of memory: {run_end.reason}"
        return replace(run_end, reason=reason)
    kills = count_text(oom_kills, "kill")
    reason = f"{run_end.reason}; its cgroup counted {kills} by the out-of-memory killer meanwhile"
    if device_type != "cpu":
        reason = f"{reason}; it is the memory of the host, which says nothing of the device's"
        return replace(run_end, cause=Cause.OTHER_MEMORY, reason=reason)
    return replace(run_end, status=Status.OOM, cause=Cause.OUT_OF_MEMORY, reason=reason)


def killed_by(what: str, number: int) -> str:
    """Say that a signal killed a process; a signal without a name is shown by its number."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    unasked = ", which the launcher did not send" if number == signal.SIGKILL else ""
    return f"{what} was killed by {name}{unasked}"
