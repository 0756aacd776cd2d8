"""Sweeps that take no time: the launcher's own pool and schedule, with simulated runs and clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batchscape.launch.pool import DevicePool, Lease
from batchscape.launch.schedule import Schedule


@dataclass
class Job:
    """A run of a simulated sweep."""

    name: str
    ranks: int
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
    waits: list[float] = field(default_factory=list)
    """How long each reservation lasted until its run started."""

    @property
    def makespan_s(self) -> float:
        """When the last run ended."""
        return max(self.ended.values(), default=0.0)


def run(
    jobs: Sequence[Job],
    devices: int,
    runs: int,
    runs_per_device: int = 1,
    check: Callable[[dict[str, Lease]], None] = lambda _: None,
) -> Story:
    """Let a sweep run: at each event the schedule is asked what starts, until nothing does.

    Parameters
    ----------
    jobs : sequence of Job
    devices : int
    runs : int
        Runs at the same time.
    runs_per_device : int
    check : callable
        Told of all leases after every start.

    Raises
    ------
    RuntimeError
        If a run never starts.
    """
    by_name = {job.name: job for job in jobs}
    schedule = Schedule(
        DevicePool(range(devices), runs_per_device), runs, lambda name: by_name[name].expected_s
    )
    queue = {job.name: job.ranks for job in jobs}
    left = {job.name: list(job.takes_s) for job in jobs}
    leases: dict[str, Lease] = {}
    story, now_s, since_s = Story(), 0.0, dict[str, float]()
    events = [(job.cancelled_at_s, True, job.name) for job in jobs]
    events = [event for event in events if event[0] < float("inf")]
    heapq.heapify(events)

    def start() -> None:
        while (started := schedule.next(queue, now_s)) is not None:
            name, leases[started[0]] = started
            del queue[name]
            story.started.append((now_s, name))
            heapq.heappush(events, (now_s + left[name].pop(0), False, name))
            check(leases)
            if name in since_s:
                story.waits.append(now_s - since_s.pop(name))
        if schedule.reservation is not None:
            since_s.setdefault(schedule.reservation.run, now_s)

    start()
    while events:
        now_s = events[0][0]
        while events and events[0][0] == now_s:
            _, is_cancelled, name = heapq.heappop(events)
            if is_cancelled:
                queue.pop(name, None)
                continue
            del leases[name]
            schedule.release(name)
            if left[name]:
                queue[name] = by_name[name].ranks
            else:
                story.ended[name] = now_s
        start()
    if queue:
        msg = f"never started: {list(queue)}"
        raise RuntimeError(msg)
    return story


def optimum_s(jobs: Sequence[tuple[int, float]], devices: int, runs: int) -> float:
    """Return the least makespan, by brute force: every choice at every moment, waiting included.

    It shares nothing with the launcher's schedule: it walks through time and decides, at every end
    of a run, which of the waiting ones to start, none among them.
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
