"""Which runs to start now. Pure: it has no clock, starts nothing and holds nothing.

Where runs go one at a time, their order is the seeded random one (a time is compared with others
of the same block, and a drift of the machine must fall on all alike). Where several go at once no
time is compared, so the order is free: what is expected to take longest starts first, and the
whole of it is planned to end early. Without expectations the order stays as it is.

The run that is to start next and does not fit keeps a `Reservation`, so that narrow runs cannot
starve a wide one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchscape.launch.packing import Piece, Timeline, plan
from batchscape.launch.reservations import Reservation

__all__ = ["Decision", "Limits", "Queued", "Running", "decide", "not_placed"]

_OVERDUE = 0.25
"""A run that takes longer than expected is taken to need so much more of what it took already."""
_NOW_S = 1e-6
"""Starts planned within this time are starts now: sums of durations are rounded."""
_LEAST_S = 1e-9
"""No run takes no time."""


@dataclass(frozen=True)
class Queued:
    """A run that waits for its start."""

    run: str
    """Its name."""
    width: int
    """Devices that it needs, each with room for one more run."""
    duration_s: float | None = None
    """How long it is expected to take; None where nothing is known."""


@dataclass(frozen=True)
class Running:
    """A run at work."""

    run: str
    width: int
    """Devices that it holds."""
    began_s: float
    """On the caller's clock."""
    duration_s: float | None = None
    """How long it was expected to take when it began."""

    def ends_at_s(self, now_s: float) -> float | None:
        """Return its expected end; None where nothing is known, or it should have ended."""
        if self.duration_s is None or self.began_s + self.duration_s < now_s:
            return None
        return self.began_s + self.duration_s

    def left_s(self, now_s: float, guess_s: float) -> float:
        """Return what it is taken to need from now on, for a plan."""
        if self.duration_s is None:
            return guess_s
        end = self.ends_at_s(now_s)
        return _OVERDUE * (now_s - self.began_s) if end is None else end - now_s


@dataclass(frozen=True)
class Limits:
    """What there is room for."""

    slots: int
    """Devices, times the runs that may share one."""
    runs: int
    """Runs at the same time."""


@dataclass(frozen=True)
class Decision:
    """What to start now, in this order, and who waits next."""

    start: tuple[str, ...]
    reservation: Reservation | None


def decide(
    queued: Sequence[Queued],
    running: Sequence[Running],
    limits: Limits,
    now_s: float,
    reservation: Reservation | None = None,
) -> Decision:
    """Decide what starts now.

    Parameters
    ----------
    queued : sequence of Queued
        In the order of the launch; none is wider than `limits.slots`.
    running : sequence of Running
    limits : Limits
    now_s : float
        Time on the caller's clock.
    reservation : Reservation, optional
        That of the last decision.

    Returns
    -------
    Decision
    """
    if limits.runs == 1:
        start = () if running or not queued else (queued[0].run,)
        return Decision(start, None)
    names = {run.run for run in running}
    if reservation is not None:
        kept = any(run.run == reservation.run for run in queued)
        reservation = reservation.without_ended(names) if kept else None
    if not queued or len(running) >= limits.runs or not _free(running, limits):
        # Nothing can start, so nobody has to be kept waiting by name.
        return Decision((), reservation)
    return _Planner(queued, running, limits, now_s, reservation).decide()


def not_placed(
    run: Queued, decision: Decision, before: Reservation | None, now_s: float
) -> Reservation:
    """Return the reservation to go on with, where a run could not be placed after all.

    Devices that are shared have room in sum, and perhaps not on enough of them; other launchers
    take devices.

    Parameters
    ----------
    run : Queued
        One that was to start.
    decision : Decision
        Which said so.
    before : Reservation or None
        What that decision was made with.
    now_s : float
        Time on the caller's clock.
    """
    if before is not None and before.run == run.run:
        return before
    kept = decision.reservation
    if kept is not None and before is not None and kept.run == before.run:
        return kept
    return Reservation(run.run, run.width, now_s, now_s)


def _free(running: Sequence[Running], limits: Limits) -> int:
    return limits.slots - sum(run.width for run in running)


class _Planner:
    """One decision."""

    def __init__(
        self,
        queued: Sequence[Queued],
        running: Sequence[Running],
        limits: Limits,
        now_s: float,
        reservation: Reservation | None,
    ) -> None:
        self._queued, self._running = queued, running
        self._limits, self._now_s = limits, now_s
        self._reservation = reservation
        known = [run.duration_s for run in queued if run.duration_s is not None]
        known += [run.duration_s for run in running if run.duration_s is not None]
        # What is unknown may be long: it goes first.
        self._guess_s = max(known, default=1.0)
        self._in_order = all(run.duration_s is None for run in queued)

    def decide(self) -> Decision:
        starts = self._plan()
        now = [run for run in self._queued if starts.get(run.run, 1.0) <= _NOW_S]
        # Whoever has the reservation goes first, then whoever takes longest.
        now.sort(key=lambda run: -self._duration(run))
        now.sort(key=lambda run: not self._is_next(run))
        chosen: list[Queued] = []
        free, runs = _free(self._running, self._limits), self._limits.runs - len(self._running)
        for run in now:
            # Planned now may mean: in a moment, when a run ends that is a little late.
            if run.width <= free and runs and self._may_start(run):
                chosen.append(run)
                free, runs = free - run.width, runs - 1
        if self._reservation is None:
            self._reservation = self._reserve(starts, chosen)
        return Decision(tuple(run.run for run in chosen), self._reservation)

    def _plan(self) -> dict[str, float]:
        """Return the planned starts by name, in seconds from now."""
        timeline = Timeline(self._limits.slots, self._limits.runs)
        for running in self._running:
            left_s = max(running.left_s(self._now_s, self._guess_s), _LEAST_S)
            timeline.add(0.0, running.width, left_s)
        starts: dict[str, float] = {}
        pieces = []
        for position, run in enumerate(self._queued):
            if self._is_next(run):
                start = starts[run.run] = timeline.earliest(run.width, self._duration(run))
                timeline.add(start, run.width, self._duration(run))
            else:
                pieces.append(Piece(position, run.width, self._duration(run)))
        found = plan(pieces, timeline, in_order=self._in_order)
        return starts | {self._queued[key].run: start for key, start in found.items()}

    def _is_next(self, run: Queued) -> bool:
        return self._reservation is not None and self._reservation.run == run.run

    def _may_start(self, run: Queued) -> bool:
        """Whether a run may start before the one that waits, which is noted."""
        if self._reservation is None or self._is_next(run):
            self._reservation = None
            return True
        passed = self._reservation.let_pass(
            run.run,
            run.width,
            None if run.duration_s is None else self._now_s + run.duration_s,
            self._limits.slots,
            self._limits.runs,
        )
        if passed is None:
            return False
        self._reservation = passed
        return True

    def _reserve(self, starts: dict[str, float], chosen: Sequence[Queued]) -> Reservation | None:
        """Keep a place for the run that is planned to start next."""
        begun = {run.run for run in chosen}
        later = [run for run in self._queued if run.run in starts and run.run not in begun]
        if not later:
            return None
        first = min(later, key=lambda run: starts[run.run])
        ends = [run.ends_at_s(self._now_s) for run in self._running]
        known = None not in ends and all(run.duration_s is not None for run in chosen)
        promised_s = self._now_s + starts[first.run] if known else None
        return Reservation(first.run, first.width, self._now_s, promised_s)

    def _duration(self, run: Queued) -> float:
        return self._guess_s if run.duration_s is None else max(run.duration_s, _LEAST_S)
