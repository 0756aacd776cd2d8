"""Which run starts next: the longest first, and a reservation for the first one that has to wait.

Where runs go one at a time they keep the order of the launch: their times are compared, and a
drift of the machine must fall on all alike. Where several go at once no time is compared, so the
order is free. What should take longest starts first, and what nobody can tell before that.

The first run that finds too few devices free reserves as many as it needs: those that are free,
then those whose runs should end first. Until it starts, another run starts before it only

* on devices that are not reserved, or
* if it should end before the runs that the reservation waits for.

Durations are estimates and may be wrong by any factor. The runs that a reservation waits for are
written down in it; once they have really ended nobody else starts on its devices, and what is at
work there then ends too. So a run waits for two others one after the other at most, however long
the queue is.

Source: EASY backfill, D. A. Lifka, The ANL/IBM SP Scheduling System, 1995,
https://doi.org/10.1007/3-540-60153-8_35. There the order is that of arrival.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from batchscape.launch.pool import DevicePool, Lease
from batchscape.record.spec import RunSpec

__all__ = ["Reservation", "Schedule", "launch_order", "makespan_s"]


@dataclass(frozen=True, eq=False)
class _AtWork:
    """One attempt at a run."""

    run: str
    lease: Lease
    began_s: float


@dataclass(frozen=True)
class Reservation:
    """Devices that are kept for the run that waits."""

    run: str
    devices: frozenset[int]
    behind: tuple[_AtWork, ...]
    """The runs that it waits for."""


class Schedule:
    """Decides which of the queued runs starts next, and leases its devices.

    It has no clock and starts nothing.

    Parameters
    ----------
    pool : DevicePool
        Nobody else leases from it.
    concurrent_runs : int
        Runs at the same time.
    expected_s : callable
        Returns how long the run of a name should take, in seconds; None: nothing is known.

    Attributes
    ----------
    reservation : Reservation or None
        That of the run that waits.
    """

    def __init__(
        self,
        pool: DevicePool,
        concurrent_runs: int,
        expected_s: Callable[[str], float | None],
    ) -> None:
        self._pool, self._concurrent_runs, self._expected_s = pool, concurrent_runs, expected_s
        self._at_work: dict[str, _AtWork] = {}
        self.reservation: Reservation | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more run may be at work."""
        return len(self._at_work) < self._concurrent_runs

    def next(self, queue: Mapping[str, int], now_s: float) -> tuple[str, Lease] | None:
        """Choose the run that starts now.

        Parameters
        ----------
        queue : mapping of str to int
            Ranks of the queued runs by name, in the order of the launch.
        now_s : float
            The time, on any clock that only goes on.

        Returns
        -------
        run : str
        lease : Lease
            Its devices; to be given back by `release`.
            None instead of both: nothing starts before a run ends, here or in another launcher.
        """
        if self.reservation is not None and self.reservation.run not in queue:
            self.reservation = None
        if not queue or not self.has_room:
            return None
        free = self._pool.available()
        if self.reservation is not None and not free:
            return None
        for run in self._order(queue):
            width = self._pool.width(queue[run])
            devices = self._open_to(run, width, free, now_s)
            lease = self._pool.lease(queue[run], devices) if width <= len(devices) else None
            if lease is not None:
                self._at_work[run] = _AtWork(run, lease, now_s)
                if self.reservation is not None and self.reservation.run == run:
                    self.reservation = None
                return run, lease
            if self.reservation is None:
                self.reservation = self._reserve(run, width, free)
        return None

    def release(self, run: str) -> None:
        """Take back the devices of a run that has ended."""
        self._pool.release(self._at_work.pop(run).lease)

    @property
    def waits_for_others(self) -> bool:
        """Whether other launchers hold devices that are reserved here."""
        if self.reservation is None:
            return False
        ours = {device for each in self._at_work.values() for device in each.lease.devices}
        return not self.reservation.devices <= ours | self._pool.available()

    def _order(self, queue: Mapping[str, int]) -> list[str]:
        if self._concurrent_runs == 1:
            return list(queue)[:1]
        waiting = None if self.reservation is None else self.reservation.run
        return sorted(queue, key=lambda run: (run != waiting, -self._takes_s(run)))

    def _open_to(self, run: str, width: int, free: frozenset[int], now_s: float) -> frozenset[int]:
        """Return the free devices that a run may take, whoever waits."""
        kept = self.reservation
        if kept is None or kept.run == run:
            return free
        spare = free - kept.devices
        behind = [each for each in kept.behind if self._at_work.get(each.run) is each]
        until_s = max(map(self._end_s, behind), default=-math.inf)
        in_time = now_s + self._takes_s(run) <= until_s < math.inf
        return free if in_time and width > len(spare) else spare

    def _reserve(self, run: str, width: int, free: frozenset[int]) -> Reservation:
        def end(each: _AtWork) -> tuple[float, float]:
            return self._end_s(each), each.began_s

        # Of several runs on a device the one that should end first, which comes last here.
        ours: dict[int, _AtWork] = {}
        for each in sorted(self._at_work.values(), key=end, reverse=True):
            ours |= dict.fromkeys(each.lease.devices, each)

        def when(device: int) -> tuple[float, float]:
            if device in free:
                return -math.inf, 0
            # Nothing is known of the runs of other launchers.
            return end(ours[device]) if device in ours else (math.inf, math.inf)

        devices = frozenset(sorted(self._pool.devices, key=when)[:width])
        behind = {ours[device] for device in devices - free if device in ours}
        return Reservation(run, devices, tuple(behind))

    def _end_s(self, each: _AtWork) -> float:
        return each.began_s + self._takes_s(each.run)

    def _takes_s(self, run: str) -> float:
        """Return how long a run should take: for ever, where nobody can tell."""
        expected_s = self._expected_s(run)
        return math.inf if expected_s is None else expected_s


def launch_order(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Order runs at random within blocks of equal seeds.

    Every block holds each geometry once, so that a drift of the machine falls on all alike. The
    order of two runs does not depend on which others there are: added runs change nothing.

    Parameters
    ----------
    specs : sequence of RunSpec
    """

    def key(spec: RunSpec) -> tuple[int, int, int, str]:
        config = spec.config
        digest = hashlib.sha256(spec.run_id.encode()).hexdigest()
        seeds = config.resolved_init_seed, config.resolved_data_seed
        return (config.timing_repeat, *seeds, digest)

    return sorted(specs, key=key)


def makespan_s(runs: Iterable[tuple[int, float]], pool: DevicePool, concurrent_runs: int) -> float:
    """Return how long a queue takes, from the first start to the last end.

    Parameters
    ----------
    runs : iterable of (int, float)
        Ranks, and seconds that the run takes, in the order of the launch.
    pool : DevicePool
        All its devices are free; locks of others are not looked at.
    concurrent_runs : int
        Runs at the same time.
    """
    alike: defaultdict[str, deque[str]] = defaultdict(deque)
    ranks: dict[str, int] = {}
    takes: dict[str, float] = {}
    for number, (width, seconds) in enumerate(runs):
        name = str(number)
        ranks[name], takes[name] = width, seconds
        alike[f"{width} {seconds}"].append(name)
    schedule = Schedule(pool, concurrent_runs, takes.__getitem__)
    # Of runs that are alike the first one starts first, so that the others need not be looked at.
    queue = {kind[0]: kind for kind in alike.values()}
    now_s, ends = 0.0, list[tuple[float, str]]()
    while queue or ends:
        while (started := schedule.next({name: ranks[name] for name in queue}, now_s)) is not None:
            run = started[0]
            heapq.heappush(ends, (now_s + takes[run], run))
            kind = queue.pop(run)
            kind.popleft()
            if kind:
                queue[kind[0]] = kind
        now_s, over = heapq.heappop(ends)
        schedule.release(over)
    return now_s
