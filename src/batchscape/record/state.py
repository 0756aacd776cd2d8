"""How a run stands: how its end is decided, and what the next command does with it.

Everybody asks here. `status.json` says how a run ended; how it stands depends as well on its
holder, and on what its ranks have left.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from batchscape.errors import RecordError
from batchscape.record.claims import CLAIMS
from batchscape.record.files import last_row, read_record
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.status import (
    FAULTS,
    Cause,
    Outcome,
    RankExit,
    RunEnd,
    RunStatus,
    Status,
    Stop,
)
from batchscape.text import count_text

if TYPE_CHECKING:
    from batchscape.record.spec import RunSpec

SIGNAL_LAG_S = 0.5
"""A process that dies by a signal closes its connections before the system reports its death, so
that its peers may complain first. The death counts as this much earlier than it was noticed."""

_CAUSE_OF_STATUS = {
    Status.OOM: Cause.OUT_OF_MEMORY,
    Status.DIVERGED: Cause.DIVERGENCE,
    Status.TIMEOUT: Cause.TIME_LIMIT,
    Status.FAILED: Cause.EXCEPTION,
    Status.INTERRUPTED: Cause.INTERRUPTED,
}
"""Cause that follows from a status, where the outcome names none."""


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
    unfinished_outcomes = {r: o for r, o in outcomes.items() if o.status is not Status.COMPLETED}
    if len(outcomes) == ranks and not unfinished_outcomes:
        return _end_completed(outcomes)
    causes = [
        (end.at, end.at, _end_by_outcome(end, rank)) for rank, end in unfinished_outcomes.items()
    ]
    exits_without_outcome = [rank_exit for rank, rank_exit in exits.items() if rank not in outcomes]
    unkilled_exits = [
        rank_exit
        for rank_exit in exits_without_outcome
        if killed_at is None or rank_exit.code != -signal.SIGKILL or rank_exit.at < killed_at
    ]
    causes += [
        (
            rank_exit.at,
            rank_exit.at - (SIGNAL_LAG_S if rank_exit.code < 0 else 0),
            _end_by_death(rank_exit, last_words),
        )
        for rank_exit in (
            unkilled_exits if unkilled_exits or unfinished_outcomes else exits_without_outcome
        )
    ]
    if stop is not None:
        # Causes after the stop are its effects, mostly deaths by the launcher's signals.
        causes = [cause for cause in causes if cause[0] < stop.at]
        if not causes:
            return RunEnd(**stop.end())
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
    cause = outcome.cause or _CAUSE_OF_STATUS.get(outcome.status)
    return RunEnd(**{**outcome.end(), "cause": cause, "rank": rank})


def _end_by_death(rank_exit: RankExit, last_words: str | None) -> RunEnd:
    """Return the end of a rank that left no outcome."""
    rank, code = rank_exit.rank, rank_exit.code
    if rank_exit.outside_cause is not None:
        return RunEnd(Status.FAILED, reason=rank_exit.outside_cause, cause=Cause.INFRASTRUCTURE)
    if code < 0:
        reason, cause = killed_by(f"rank {rank}", -code), Cause.SIGNAL
    else:
        reason, cause = f"rank {rank} left no outcome and exited with code {code}", Cause.EXCEPTION
    if code == -signal.SIGKILL:
        cause = Cause.KILLED
    elif last_words is not None:
        reason = f"{reason}; its log ends: {last_words}"
    return RunEnd(Status.FAILED, reason=reason, rank=rank, cause=cause)


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
        reason = f"{reason}; that is the memory of the host, not of the device"
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


LOST = RunEnd(Status.INTERRUPTED, reason="the launcher died", cause=Cause.INTERRUPTED)
"""End of an attempt that nobody could write."""


class Next(StrEnum):
    """Next step of the same command with a run."""

    SKIP = "skip"
    """It is over."""
    WAIT = "wait"
    """It runs now, and another launcher leaves it alone."""
    SEAL = "seal"
    """It was trained to its end, and only its seal could not be written: seals it from its rows."""
    BEGIN = "begin"
    """Starts it from its first step."""
    GO_ON = "go_on"
    """Goes on from its newest checkpoint, or starts a program that goes on by itself."""
    LEAVE = "leave"
    """Leaves it as it is; a fault is repeated where `--retry` names its status."""
    REJECT = "reject"
    """Lists it."""

    @property
    def is_work(self) -> bool:
        """Whether the same command would do anything."""
        return self in {Next.SEAL, Next.BEGIN, Next.GO_ON}


@dataclass(frozen=True)
class RunState:
    """State of a run."""

    folder: RunFolder
    record: RunStatus = field(default_factory=lambda: RunStatus(Status.PENDING))
    """Content of its `status.json`; without one the run is pending."""
    holder: str | None = None
    """Launcher that has it; None for a sealed run."""
    processes: int = 1
    """Number of processes that leave an outcome each."""
    is_resumable: bool = False
    """Whether it is a program that goes on when it is started again."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of its `config.json`, where it was read."""

    def next_step(self, retry: Collection[Status] = ()) -> Next:
        """Return the next step of the same command, which repeats the faults in `retry`."""
        status = self.record.status
        if status.is_sealed:
            return Next.SKIP
        if self.holder is not None:
            return Next.WAIT
        if status is Status.REJECTED:
            return Next.REJECT
        if self.record.attempts and final_end(self.folder, self.processes) is not None:
            return Next.SEAL
        if status in FAULTS and status not in retry:
            return Next.LEAVE
        return Next.GO_ON if self.goes_on else Next.BEGIN

    @property
    def goes_on(self) -> bool:
        """Whether another attempt goes on; else the ranks drop the rows and begin again."""
        by_itself = self.is_resumable and bool(self.record.attempts)
        return by_itself or self.folder.checkpoint_step is not None

    @property
    def is_lost(self) -> bool:
        """Whether its status is `running`, and no launcher has it."""
        return self.record.status is Status.RUNNING and self.holder is None

    @property
    def lost_at(self) -> float:
        """Time of the end of a lost run, in seconds since the epoch: when it last wrote."""
        # An attempt begins after those before it, even where its launcher's clock is behind.
        return max(self.record.attempts[-1].started_at, self.folder.written_at)

    @property
    def shown(self) -> RunEnd:
        """Its status, cause and reason as they are shown, which depend on its holder as well."""
        if self.record.status is Status.INTERRUPTED and self.holder is not None:
            return RunEnd(Status.RUNNING)  # its launcher keeps it for the next attempt
        return LOST if self.is_lost else self.record


def read_state(
    folder: RunFolder, spec: RunSpec | None = None, *, is_ours: bool = False
) -> RunState:
    """Read the state of a run.

    Parameters
    ----------
    folder : RunFolder
    spec : RunSpec, optional
        Specification of the run; by default it is read from the folder.
    is_ours : bool
        Whether the caller has claimed the run, or is about to; then the holder is not read.

    Raises
    ------
    RecordError
        If its folder is damaged, or of another format version.
    OSError
        If it cannot be read.
    """
    config: Mapping[str, Any] = {}
    # A launcher that has begun a run has written its status; one that made its folder, perhaps not.
    has_begun = folder.status.exists() or folder.launch.exists()
    if spec is None and (has_begun or folder.config.exists()):
        config = read_record(folder.config)
    record = RunStatus.read(folder.status) if has_begun else RunStatus(Status.PENDING)
    # The holder is read after the status: a run that ends between is not taken for a lost one.
    holder = None if is_ours or record.status.is_sealed else CLAIMS.holder(folder)
    if record.status is Status.RUNNING and holder is None and not is_ours:
        record = RunStatus.read(folder.status)
    if spec is not None:
        processes, is_resumable = spec.processes, spec.is_resumable_program
    else:
        engine = (config.get("config") or {}).get("engine") or {}
        is_program = engine.get("name") == "command"
        ranks = (config.get("geometry") or {}).get("data_parallel_size", 1)
        processes = 1 if is_program else ranks
        is_resumable = is_program and bool(engine.get("resumable"))
    return RunState(folder, record, holder, processes, is_resumable, config)


def final_end(folder: RunFolder, processes: int) -> tuple[RunEnd, float] | None:
    """Return how a run ended that was trained to its end, and when; None where it was not.

    Parameters
    ----------
    folder : RunFolder
    processes : int
        Number of processes that leave an outcome each.

    Returns
    -------
    end : RunEnd
    ended_at : float
        In seconds since the epoch. None instead of both unless the ranks of the latest attempt
        agree on a final end, and the rows of all steps exist.
    """
    try:
        reports = {rank: Outcome.read(folder, rank) for rank in range(processes)}
        done = last_row(folder.lines("steps")).get("optimizer_step", 0)
    except RecordError:
        return None
    outcomes = {rank: outcome for rank, outcome in reports.items() if outcome is not None}
    if len(outcomes) < processes:
        return None
    if any(outcome.optimizer_step != done for outcome in outcomes.values()):
        return None
    end = decide(processes, outcomes, {})
    ended_at = max(outcome.at for outcome in outcomes.values())
    return (end, ended_at) if end.status.is_sealed else None


def unsealed(specs: Iterable[RunSpec], sweep: SweepFolder) -> list[RunSpec]:
    """Return the runs without sealed tables; one whose launcher died while sealing has them."""
    sealed = {f.path.name for f in sweep.run_folders() if f.parquet("steps").exists()}
    return [spec for spec in specs if spec.run_id not in sealed]


def is_tried_again(status: RunStatus, retries_left: int) -> bool:
    """Return whether the launch that saw a run end tries it again, from its newest checkpoint.

    It does where the machine may have ended the run: a hang, a rank that was killed, crashed or
    lost its connection, a fork server that died. It does not where the same run would end likewise:
    an exception, memory that is out, divergence, a time limit, damaged records.
    """
    if status.status is not Status.FAILED or status.cause is None:
        return False
    return retries_left > 0 and status.cause.is_of_the_machine
