"""Sweeps that take no time: the launcher's own pool and schedule, with simulated runs and clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batchscape.launch.pool import DevicePool, Lease
from batchscape.launch.reservations import Reservation
from batchscape.launch.schedule import Limits, Queued, Running, decide, not_placed


@dataclass
class Job:
    """A run of a simulated sweep."""

    name: str
    width: int
    takes_s: list[float]
    """What each of its attempts takes; all but the last one fail and are queued again."""
    expected_s: float | None = None
    """What the schedule is told."""
    cancelled_at_s: float = float("inf")
    """When it is taken out of the queue, if it has not started by then."""


@dataclass
class Story:
    """What happened."""

    started: list[tuple[float, str]] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)
    waits: list[tuple[Reservation, float]] = field(default_factory=list)
    """Reservations, and when their run started."""

    @property
    def makespan_s(self) -> float:
        """When the last run ended."""
        return max(self.ended.values(), default=0.0)


class Sweep:
    """A sweep that runs: at each event it asks the schedule what to start, and leases devices.

    Parameters
    ----------
    jobs : sequence of Job
    devices : int
    runs : int
        Runs at the same time.
    runs_per_device : int
    check : callable
        Told of the leases and the time after every start.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        devices: int,
        runs: int,
        runs_per_device: int = 1,
        check: Callable[[dict[str, Lease], float], None] = lambda *_: None,
    ) -> None:
        self._pool = DevicePool(range(devices), runs_per_device)
        self._limits = Limits(devices * runs_per_device, runs)
        self._jobs = {job.name: job for job in jobs}
        self._left = {job.name: list(job.takes_s) for job in jobs}
        self._queue = [job.name for job in jobs]
        self._leases: dict[str, Lease] = {}
        self._running: dict[str, Running] = {}
        self._reservation: Reservation | None = None
        self._check = check
        self._story = Story()
        cancelled = [(job.cancelled_at_s, True, job.name) for job in jobs]
        self._events = [event for event in cancelled if event[0] < float("inf")]
        heapq.heapify(self._events)

    def run(self) -> Story:
        """Let everything happen; RuntimeError if a run never starts."""
        now_s = 0.0
        while True:
            while self._start(now_s):
                pass
            if not self._events:
                break
            now_s = self._events[0][0]
            while self._events and self._events[0][0] == now_s:
                self._happen(*heapq.heappop(self._events))
        if self._queue:
            msg = f"never started: {self._queue}"
            raise RuntimeError(msg)
        return self._story

    def _start(self, now_s: float) -> bool:
        queued = {name: self._queued(name) for name in self._queue}
        running, before = list(self._running.values()), self._reservation
        decision = decide(list(queued.values()), running, self._limits, now_s, before)
        self._reservation = decision.reservation
        for name in decision.start:
            lease = self._pool.lease(self._jobs[name].width, max_ranks_per_device=64)
            if lease is None:
                self._reservation = not_placed(queued[name], decision, before, now_s)
                return False
            if before is not None and before.run == name:
                self._story.waits.append((before, now_s))
            self._queue.remove(name)
            self._leases[name] = lease
            expected_s = self._jobs[name].expected_s
            self._running[name] = Running(name, len(lease.devices), now_s, expected_s)
            self._story.started.append((now_s, name))
            heapq.heappush(self._events, (now_s + self._left[name][0], False, name))
            self._check(self._leases, now_s)
        return bool(decision.start)

    def _happen(self, now_s: float, cancelled: bool, name: str) -> None:
        if not cancelled:
            self._pool.release(self._leases.pop(name))
            del self._running[name], self._left[name][0]
            if self._left[name]:
                self._queue.append(name)
            else:
                self._story.ended[name] = now_s
        elif name in self._queue:
            self._queue.remove(name)

    def _queued(self, name: str) -> Queued:
        job = self._jobs[name]
        return Queued(name, self._pool.width(job.width), job.expected_s)


def optimum_s(jobs: Sequence[tuple[int, float]], devices: int, runs: int) -> float:
    """Return the least makespan, by brute force: every choice at every moment, waiting included.

    An oracle that shares nothing with the launcher's search: it walks through time and decides, at
    every end of a run, which of the waiting ones to start, none among them.
    """
    best = sum(duration for _, duration in jobs)

    def walk(now: float, active: tuple[tuple[float, int], ...], left: tuple[int, ...]) -> None:
        nonlocal best
        latest = max((end for end, _ in active), default=now)
        if not left:
            best = min(best, latest)
            return
        owed = sum(jobs[i][0] * jobs[i][1] for i in left)
        owed += sum(width * (end - now) for end, width in active)
        longest = max(jobs[i][1] for i in left)
        if max(latest, now + longest, now + owed / devices) >= best - 1e-12:
            return
        free = devices - sum(width for _, width in active)
        for size in range(min(len(left), runs - len(active)), -1, -1):
            if size == 0 and not active:
                continue
            seen = set()
            for chosen in itertools.combinations(left, size):
                kinds = tuple(sorted(jobs[i] for i in chosen))
                if kinds in seen or sum(jobs[i][0] for i in chosen) > free:
                    continue
                seen.add(kinds)
                begun = tuple((now + jobs[i][1], jobs[i][0]) for i in chosen)
                ends = active + begun
                until = min(end for end, _ in ends)
                walk(
                    until,
                    tuple(entry for entry in ends if entry[0] > until),
                    tuple(i for i in left if i not in chosen),
                )

    walk(0.0, (), tuple(range(len(jobs))))
    return best


def first_come_first_served_s(jobs: Sequence[tuple[int, float]], devices: int, runs: int) -> float:
    """Return the makespan where runs start strictly in their order, each as soon as it fits."""
    now, active = 0.0, []
    for width, duration in jobs:
        while len(active) == runs or devices - sum(w for _, w in active) < width:
            now = max(now, min(active)[0])
            active = [entry for entry in active if entry[0] > now]
        active.append((now + duration, width))
    return max((end for end, _ in active), default=0.0) if active else 0.0
