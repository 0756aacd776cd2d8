"""Which run of a launch gets which devices of this machine, beside what other launchers hold."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from batchscape.config import Local
from batchscape.launch.device_locks import DeviceLocks
from batchscape.launch.durations import Durations
from batchscape.launch.pool import DevicePool, Lease
from batchscape.launch.schedule import Schedule, makespan_s
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine

__all__ = ["Placement"]

_BETWEEN_S = 0.1
"""From the end of a run's processes to the start of the next run: it is sealed, and one chosen."""
_GIVE_UP_S = 12 * 3600.0
"""How long a launcher that has no run at work waits for devices of others."""
_TURN_S = 600.0
"""How long a launcher that waits for devices of others keeps them from starting anything."""
_PAUSE_S = 3.0
"""How long they may start runs then: a launcher that waits for its turn tries more often."""


class Placement:
    """Gives runs their devices, one after the other; each is to be started or released.

    Parameters
    ----------
    specs : sequence of RunSpec
        What is to be launched, all with the same launcher and on devices of one type. The plan has
        rejected those with more ranks than may share these devices.
    machine : Machine
    durations : Durations
        Asked only where runs go several at a time.
    warn : callable
        Told in words when devices cannot be locked.
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        machine: Machine,
        durations: Durations,
        warn: Callable[[str], None],
    ) -> None:
        launcher, device_type = specs[0].config.launcher, specs[0].device_type
        self._specs = {spec.run_id: spec for spec in specs}
        self._durations = durations
        if device_type == "cpu":
            names = {core: str(core) for core in machine.core_numbers}
            self._noun = "cores"
        else:
            names = {device.index: device.uuid for device in machine.cuda_devices}
            self._noun = "CUDA devices"
        self._launcher = launcher
        # In an allocation nobody else has the devices.
        exclusive = isinstance(launcher, Local) and launcher.exclusive_devices
        self._locks = DeviceLocks(device_type, names, warn) if exclusive else None
        self._pool = DevicePool(names, launcher.max_runs_per_device, self._locks)
        self._schedule = Schedule(
            self._pool,
            launcher.concurrent_runs,
            lambda run: durations.expected_s(self._specs[run]),
        )
        self._waits_for_others = False
        self._keeps_until_s = math.inf
        self._pauses_until_s = -math.inf
        self._began_s = time.monotonic()

    def add(self, specs: Iterable[RunSpec]) -> None:
        """Take on more runs, like the others in launcher and type of device."""
        self._specs |= {spec.run_id: spec for spec in specs}

    def next(self, queue: deque[RunSpec]) -> tuple[RunSpec, Lease] | None:
        """Take the run that is to start next out of the queue, with its devices.

        Parameters
        ----------
        queue : deque of RunSpec
            In the order of the launch.

        Returns
        -------
        spec : RunSpec
        lease : Lease
            None instead of both: nothing starts before a run ends, here or in another launcher.
        """
        self._waits_for_others = False
        if not queue or not self._schedule.has_room:
            self.close()
            return None
        now_s = time.monotonic()
        if self._locks is not None and (
            now_s < self._pauses_until_s or not self._locks.take_turn()
        ):
            self._waits_for_others = True
            return None
        ranks = {spec.run_id: spec.geometry.data_parallel_size for spec in queue}
        started = self._schedule.next(ranks, now_s)
        self._waits_for_others = started is None and self._schedule.waits_for_others
        if not self._waits_for_others:
            self.close()
        elif now_s >= self._keeps_until_s:
            # What is held may never be given back: by a rank that is stuck in a driver, say.
            self.close()
            self._pauses_until_s = now_s + _PAUSE_S
        else:
            self._keeps_until_s = min(self._keeps_until_s, now_s + _TURN_S)
        if started is None:
            return None
        self._began_s = now_s
        spec = self._specs[started[0]]
        queue.remove(spec)
        return spec, started[1]

    def left_s(self, at_work: Iterable[tuple[RunSpec, float]], queue: Iterable[RunSpec]) -> float:
        """Return the time until the last run ends, as the queue would place them.

        Parameters
        ----------
        at_work : iterable of (RunSpec, float)
            Runs, and for how many seconds each will still be at work; NaN where nobody can tell.
        queue : iterable of RunSpec

        Returns
        -------
        float
            In seconds; NaN where a run's time is not known.
        """
        left = [(spec.geometry.data_parallel_size, seconds) for spec, seconds in at_work]
        for spec in queue:
            expected_s = self._durations.expected_s(spec)
            seconds = math.nan if expected_s is None else _BETWEEN_S + expected_s
            left.append((spec.geometry.data_parallel_size, seconds))
        if any(math.isnan(seconds) for _, seconds in left):
            return math.nan
        pool = DevicePool(self._pool.devices, self._launcher.max_runs_per_device)
        return makespan_s(left, pool, self._launcher.concurrent_runs)

    def expected_s(self, spec: RunSpec) -> float | None:
        """Return how long a run should take, in seconds; None: nothing is known."""
        return self._durations.expected_s(spec)

    @property
    def waiting(self) -> RunSpec | None:
        """The run that devices are kept for."""
        kept = self._schedule.reservation
        return None if kept is None else self._specs[kept.run]

    @property
    def has_given_up(self) -> bool:
        """Whether nothing could start for too long, because of other launchers."""
        return self._waits_for_others and time.monotonic() - self._began_s >= _GIVE_UP_S

    @property
    def waits(self) -> str | None:
        """Why nothing starts, where other launchers are the reason."""
        if self._locks is None or not self._waits_for_others:
            return None
        return (
            f"Waiting for {self._noun} that another launcher holds ({self._locks.holders()}; "
            f"locks in {self._locks.folder}); this one gives up after {_GIVE_UP_S / 3600:g} h "
            "without a run; launcher.exclusive_devices=false would share them"
        )

    def release(self, spec: RunSpec) -> None:
        """Take back the devices of a run that has ended, or that did not start."""
        self._began_s = time.monotonic()
        self._schedule.release(spec.run_id)

    def learn(self, spec: RunSpec, status: RunStatus) -> None:
        """Take note of how a run ended: the next one like it will take as long."""
        self._durations.learn(spec, status)

    def close(self) -> None:
        """Let other launchers start runs."""
        self._keeps_until_s = math.inf
        if self._locks is not None:
            self._locks.end_turn()
