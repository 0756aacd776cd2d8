"""Which run of a launch starts next, and on which devices of this machine.

Runs that go one at a time keep the order of the launch: their times are compared, and a drift of
the machine must fall on all alike. Where several go at once no time is compared, and what should
take longest starts first; a run that nobody can tell the time of comes before that. The queue is
strict: nothing starts past its head.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from batchscape.config import Local
from batchscape.launch.devices import DeviceLocks, DevicePool, Lease
from batchscape.launch.durations import Durations
from batchscape.launch.schedule import makespan_s
from batchscape.record.progress import remaining_s
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus
from batchscape.text import duration_text

if TYPE_CHECKING:
    from batchscape.launch.active import ActiveRun
    from batchscape.plan.machine import Machine

__all__ = ["Placement"]

_BETWEEN_S = 0.1
"""From the end of a run's processes to the start of the next run: it is sealed, and one chosen."""
_GIVE_UP_S = 12 * 3600.0
"""How long a launcher that has no run at work waits for devices of others."""
_PAUSE_S = 1.0
"""How long nothing starts after the end of a run while another launcher waits for devices: it looks
for them twice in that time."""

_FORESEE_S, _FORESEE_SHARE = 5.0, 0.002
"""Least time between two looks ahead while the same runs are at work, and the share of the time
that looking may take."""


class _Foreseen(NamedTuple):
    """When the last run should end."""

    state: object
    """The runs that were at work, and how many had been before."""
    end: float
    """By the monotonic clock; NaN where it is not known."""
    until: float
    """When it is looked at again, by the same clock."""


class Placement:
    """Gives runs their devices, one after the other; each is to be started or released.

    Parameters
    ----------
    spec : RunSpec
        One of those that are launched, all with its launcher and on its type of devices. The plan
        has rejected those with more ranks than may share these devices.
    machine : Machine
    durations : Durations
        Asked only where runs go several at a time.
    warn : callable
        Told in words when devices cannot be locked.
    """

    def __init__(
        self,
        spec: RunSpec,
        machine: Machine,
        durations: Durations,
        warn: Callable[[str], None],
    ) -> None:
        launcher, device_type = spec.config.launcher, spec.device_type
        self._durations = durations
        if device_type == "cpu":
            names = {core: str(core) for core in machine.core_numbers}
            self._noun = "cores"
        else:
            names = {device.index: device.uuid for device in machine.cuda_devices}
            self._noun = "CUDA devices"
        self._launcher = launcher
        # In an allocation nobody else has the devices.
        is_local = isinstance(launcher, Local)
        self._locks = DeviceLocks(device_type, names, warn) if is_local else None
        self._pool = DevicePool(names, launcher.runs_per_device, self._locks)
        self._leases: dict[str, Lease] = {}
        self.waiting: RunSpec | None = None
        """The run at the head of the queue, for which there is no room."""
        self._paused_until_s = -math.inf
        self._began_s = time.monotonic()
        self._released = 0
        self._foreseen = _Foreseen(None, math.nan, -math.inf)

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
        if not queue or len(self._leases) >= self._launcher.concurrent_runs:
            self.close()
            return None
        self._show_waiting(False)
        now_s = time.monotonic()
        is_paused = self.waiting is None and now_s < self._paused_until_s
        if is_paused and self._locks is not None and self._locks.others_wait:
            return None
        spec = min(queue, key=self._order) if self._launcher.concurrent_runs > 1 else queue[0]
        lease = self._pool.lease(spec.geometry.data_parallel_size)
        self.waiting = spec if lease is None else None
        self._show_waiting(self._pool.waits_for_others)
        if lease is None:
            return None
        self._began_s = now_s
        self._leases[spec.run_id] = lease
        queue.remove(spec)
        return spec, lease

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
        runs = [(spec.geometry.data_parallel_size, seconds) for spec, seconds in at_work]
        ordered = list(queue)
        if self._launcher.concurrent_runs > 1:
            ordered.sort(key=self._order)
        for spec in ordered:
            expected_s = self._durations.expected_s(spec)
            seconds = math.nan if expected_s is None else _BETWEEN_S + expected_s
            runs.append((spec.geometry.data_parallel_size, seconds))
        if any(math.isnan(seconds) for _, seconds in runs):
            return math.nan
        return makespan_s(
            runs,
            len(self._pool.devices),
            self._launcher.concurrent_runs,
            self._launcher.runs_per_device,
        )

    def foreseen_s(self, active: Mapping[str, ActiveRun], queue: Iterable[RunSpec]) -> float:
        """Return the time until the last run ends, in seconds; NaN where it is not known."""
        now, state = time.monotonic(), (self._released, tuple(active))
        if self._foreseen.state == state and now < self._foreseen.until:
            foreseen_s = self._foreseen.end - now
            return foreseen_s if math.isnan(foreseen_s) else max(0.0, foreseen_s)
        at_work = []
        for run in active.values():
            left_s = remaining_s(run.last_row, run.spec.optimizer_steps)
            if left_s is None:
                expected_s = self._durations.expected_s(run.spec)
                elapsed_s = now - run.began
                left_s = math.nan if expected_s is None else max(0.0, expected_s - elapsed_s)
            at_work.append((run.spec, left_s))
        left_s = self.left_s(at_work, queue)
        # A long queue takes time to simulate, and what is timed has the core.
        until = now + max(_FORESEE_S, (time.monotonic() - now) / _FORESEE_SHARE)
        self._foreseen = _Foreseen(state, now + left_s, until)
        return left_s

    def _order(self, spec: RunSpec) -> float:
        """Sort what should take longest first, and what nobody can tell before that."""
        expected_s = self._durations.expected_s(spec)
        return -math.inf if expected_s is None else -expected_s

    @property
    def has_given_up(self) -> bool:
        """Whether nothing could start for too long, because of other launchers."""
        return self.waits is not None and time.monotonic() - self._began_s >= _GIVE_UP_S

    @property
    def waits(self) -> str | None:
        """Why nothing starts, where other launchers are the reason."""
        if self._locks is None or not self._pool.waits_for_others:
            return None
        return (
            f"Waiting for {self._noun} that another launcher holds (`lslocks` shows who locks "
            f"files in {self._locks.folder}); this one gives up after "
            f"{duration_text(_GIVE_UP_S)} without a run"
        )

    def release(self, spec: RunSpec) -> None:
        """Take back the devices of a run that has ended, or that did not start."""
        self._released += 1
        self._began_s = time.monotonic()
        self._paused_until_s = self._began_s + _PAUSE_S
        self._pool.release(self._leases.pop(spec.run_id))

    def learn(self, spec: RunSpec, status: RunStatus) -> None:
        """Take note of how a run ended: the next one like it will take as long."""
        self._durations.learn(spec, status)

    def close(self) -> None:
        """Let other launchers have what no run is on."""
        self._pool.close()
        self.waiting = None
        self._show_waiting(False)

    def _show_waiting(self, is_waiting: bool) -> None:
        if self._locks is not None:
            self._locks.show_waiting(is_waiting)
