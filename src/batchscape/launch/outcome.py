"""How a run ended, from what its ranks left behind. Pure: it reads no clock and no process."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchscape.errors import RecordError
from batchscape.launch.child import RankExit
from batchscape.record.files import read_json
from batchscape.record.status import Status, StopReason

__all__ = ["SIGNAL_LAG_S", "Outcome", "Stop", "Verdict", "decide"]

SIGNAL_LAG_S = 0.5
"""A process that dies by a signal closes its connections before the system reports its death, so
that its peers may complain first. The death counts as this much earlier than it was noticed."""


@dataclass(frozen=True)
class Outcome:
    """Content of `outcome-<rank>.json`."""

    status: Status
    stop_reason: StopReason | None
    reason: str | None
    at: float
    """Seconds since the epoch."""
    optimizer_step: int
    phase: str | None

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Read the outcome of one rank.

        Raises
        ------
        RecordError
            If the file is missing or damaged.
        """
        content = read_json(path)
        try:
            stop_reason = content["stop_reason"]
            return cls(
                status=Status(content["status"]),
                stop_reason=None if stop_reason is None else StopReason(stop_reason),
                reason=content["reason"],
                at=float(content["at"]),
                optimizer_step=content["optimizer_step"],
                phase=content["phase"],
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path} is damaged: {error}"
            raise RecordError(msg) from None


@dataclass(frozen=True)
class Stop:
    """The launcher asked a run to end."""

    status: Status
    """`interrupted`, `timeout`, or `failed` for a run that hangs at its end."""
    reason: str
    at: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Verdict:
    """How a run ended."""

    status: Status
    stop_reason: StopReason | None = None
    reason: str | None = None
    rank: int | None = None
    """The rank that raised the cause, where one did."""


def decide(
    ranks: int,
    outcomes: Mapping[int, Outcome],
    exits: Mapping[int, RankExit],
    stop: Stop | None = None,
    last_words: str | None = None,
) -> Verdict:
    """Find what ended a run first; the rest are its consequences.

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
        Last line of the log, shown for a rank that said nothing else.

    Returns
    -------
    Verdict
        `completed` only if every rank says so. Otherwise the earliest cause decides: an outcome
        that is not `completed`, a rank without an outcome, or the stop.
    """
    unfinished = {r: o for r, o in outcomes.items() if o.status is not Status.COMPLETED}
    if len(outcomes) == ranks and not unfinished:
        return _completed(outcomes)
    causes = [
        (outcome.at, outcome.at, Verdict(outcome.status, reason=outcome.reason, rank=rank))
        for rank, outcome in unfinished.items()
    ]
    causes += [
        (
            ended.at,
            ended.at - (SIGNAL_LAG_S if ended.code < 0 else 0),
            Verdict(Status.FAILED, reason=_describe(ended, last_words), rank=rank),
        )
        for rank, ended in exits.items()
        if rank not in outcomes
    ]
    if stop is not None:
        # What follows the stop is its effect, a death by our own signal above all.
        causes = [cause for cause in causes if cause[0] < stop.at]
        if not causes:
            return Verdict(stop.status, reason=stop.reason)
    return min(causes, key=lambda cause: cause[1])[2]


def _completed(outcomes: Mapping[int, Outcome]) -> Verdict:
    reasons = {rank: outcome.stop_reason for rank, outcome in outcomes.items()}
    if len(set(reasons.values())) > 1:
        listed = ", ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
        return Verdict(Status.FAILED, reason=f"the ranks stopped for different reasons ({listed})")
    return Verdict(Status.COMPLETED, stop_reason=reasons[0])


def _describe(ended: RankExit, last_words: str | None) -> str:
    if ended.code == -signal.SIGKILL:
        return f"rank {ended.rank} was killed by SIGKILL (often the system's out-of-memory killer)"
    if ended.code < 0:
        cause = f"rank {ended.rank} was killed by {_signal_name(-ended.code)}"
    else:
        cause = f"rank {ended.rank} left no outcome and exited with code {ended.code}"
    return cause if last_words is None else f"{cause}; its log ends: {last_words}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
