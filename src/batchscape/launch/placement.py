"""Which run starts next, and on which devices: what is queued, what is free, what is planned."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchscape.config import Local
from batchscape.errors import LaunchError
from batchscape.launch.device_locks import DeviceLocks
from batchscape.launch.durations import Durations
from batchscape.launch.pool import DevicePool, Lease
from batchscape.launch.reservations import Reservation
from batchscape.launch.schedule import Decision, Limits, Queued, Running, decide, not_placed
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine

__all__ = ["GIVE_UP_S", "Placed", "Placement"]

_OTHERS = ""
"""Name of what other launchers have at work, as if it were one run."""
_NOUNS = {"cpu": "cores", "cuda": "CUDA devices"}
GIVE_UP_S = 12 * 3600.0
"""How long to wait for devices that others hold with no run at work: longer than a run that
somebody lets go on overnight."""


@dataclass(frozen=True)
class Placed:
    """The run that starts next."""

    spec: RunSpec
    lease: Lease | None
    """Its devices; None where it can never have any."""
    problem: str = ""
    """Why it cannot."""


@dataclass
class _Kind:
    """Devices of one kind, and who waits for them."""

    name: str
    pool: DevicePool
    locks: DeviceLocks | None
    reservation: Reservation | None = None
    running: dict[str, Running] = field(default_factory=dict)
    due: deque[Queued] = field(default_factory=deque)
    """Runs to start now."""
    decision: Decision | None = None
    """Which said so."""
    before: Reservation | None = None
    """The reservation that it was made with."""
    fruitless: object = None
    """What was queued, at work and held by others when nothing could start."""


class Placement:
    """Gives runs their devices, one after the other; each is to be started or released.

    Parameters
    ----------
    machine : Machine
    launcher : Local
        Settings of the sweep.
    durations : Durations
        Asked only where runs go several at a time.
    warn : callable
        Told in words when devices cannot be locked.
    """

    def __init__(
        self,
        machine: Machine,
        launcher: Local,
        durations: Durations,
        warn: Callable[[str], None],
    ) -> None:
        self._launcher, self._durations = launcher, durations
        self._kinds = {
            kind: self._kind(kind, names, warn)
            for kind, names in {
                "cpu": {core: str(core) for core in machine.core_numbers},
                "cuda": {device.index: device.uuid for device in machine.cuda_devices},
            }.items()
        }
        self.waits: str | None = None
        """Why nothing starts, where other launchers are the reason."""
        self._waits_since: float | None = None

    def _kind(self, kind: str, names: dict[int, str], warn: Callable[[str], None]) -> _Kind:
        exclusive = self._launcher.exclusive_devices
        locks = DeviceLocks(kind, names, warn) if exclusive and names else None
        return _Kind(kind, DevicePool(names, self._launcher.max_runs_per_device, locks), locks)

    def next(self, queue: deque[RunSpec]) -> Placed | None:
        """Take the run that is to start next out of the queue, with its devices.

        Parameters
        ----------
        queue : deque of RunSpec
            In the order of the launch.

        Returns
        -------
        Placed or None
            None when nothing more starts before a run ends, or another launcher's does.
        """
        self.waits = None
        for kind in self._kinds.values():
            placed = self._next_of(kind, queue)
            if placed is not None:
                self._waits_since = None
                return placed
        if self.waits is None or any(kind.running for kind in self._kinds.values()):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()
        return None

    @property
    def has_given_up(self) -> bool:
        """Whether nothing was at work for too long because others hold the devices."""
        since = self._waits_since
        return since is not None and time.monotonic() - since >= GIVE_UP_S

    def release(self, spec: RunSpec, lease: Lease) -> None:
        """Take back the devices of a run that has ended, or that did not start."""
        kind = self._kinds[spec.device_type]
        kind.running.pop(spec.run_id, None)
        kind.pool.release(lease)

    def learn(self, spec: RunSpec, status: RunStatus) -> None:
        """Take note of how a run ended: the next one like it will take as long."""
        if self._launcher.concurrent_runs > 1:
            self._durations.learn(spec, status)

    def close(self) -> None:
        """Let other launchers start runs."""
        for kind in self._kinds.values():
            if kind.locks is not None:
                kind.locks.end_turn()

    def _next_of(self, kind: _Kind, queue: deque[RunSpec]) -> Placed | None:
        specs = {spec.run_id: spec for spec in queue if spec.device_type == kind.name}
        if not specs or not self._room():
            self._end_round(kind, queue)
            return None
        considered = list(specs.values())
        if self._launcher.concurrent_runs == 1:
            del considered[1:]
        for spec in considered:
            try:
                kind.pool.check(spec.geometry.data_parallel_size, self._ranks_per_device(kind))
            except LaunchError as error:
                queue.remove(spec)
                return Placed(spec, None, str(error))
        if kind.locks is not None and not kind.locks.take_turn():
            self.waits = _waits(kind)
            kind.due.clear()
            return None
        if not kind.due and not self._decide(kind, considered):
            self._end_round(kind, queue)
            return None
        return self._lease(kind, specs, queue)

    def _decide(self, kind: _Kind, specs: Sequence[RunSpec]) -> bool:
        """Decide what starts now; False if nothing does."""
        others, shares = kind.pool.taken_by_others(), self._launcher.max_runs_per_device
        situation = ([spec.run_id for spec in specs], list(kind.running), others)
        if others and not kind.running:
            self.waits = _waits(kind)
        if situation == kind.fruitless:
            return False
        running = list(kind.running.values())
        limits = Limits(len(kind.pool.devices) * shares, len(running) + self._room())
        now_s = time.monotonic()
        if others and limits.runs > 1:
            running.append(Running(_OTHERS, others * shares, now_s))
            limits = Limits(limits.slots, limits.runs + 1)
        queued = [self._queued(kind, spec, one=limits.runs == 1) for spec in specs]
        kind.before = kind.reservation
        kind.decision = decide(queued, running, limits, now_s, kind.before)
        kind.reservation = kind.decision.reservation
        by_name = {run.run: run for run in queued}
        kind.due.extend(by_name[name] for name in kind.decision.start)
        kind.fruitless = None if kind.due else situation
        return bool(kind.due)

    def _lease(
        self, kind: _Kind, specs: dict[str, RunSpec], queue: deque[RunSpec]
    ) -> Placed | None:
        run = kind.due.popleft()
        spec, now_s = specs[run.run], time.monotonic()
        lease = kind.pool.lease(spec.geometry.data_parallel_size, self._ranks_per_device(kind))
        if lease is None:
            kind.due.clear()
            if kind.decision is not None:
                kind.reservation = not_placed(run, kind.decision, kind.before, now_s)
            if not kind.running:
                self.waits = _waits(kind)
            self._end_round(kind, queue)
            return None
        queue.remove(spec)
        self.waits = None
        kind.running[run.run] = Running(run.run, len(lease.devices), now_s, run.duration_s)
        return Placed(spec, lease)

    def _end_round(self, kind: _Kind, queue: deque[RunSpec]) -> None:
        # One that has nothing at work keeps the turn, so that the others come to an end.
        if kind.locks is not None and (kind.running or not queue or self.waits is None):
            kind.locks.end_turn()

    def _room(self) -> int:
        """Return how many more runs may be at work."""
        active = sum(len(kind.running) for kind in self._kinds.values())
        return self._launcher.concurrent_runs - active

    def _queued(self, kind: _Kind, spec: RunSpec, *, one: bool) -> Queued:
        width = kind.pool.width(spec.geometry.data_parallel_size)
        return Queued(spec.run_id, width, None if one else self._durations.expected_s(spec))

    def _ranks_per_device(self, kind: _Kind) -> int:
        launcher = self._launcher
        return launcher.max_ranks_per_core if kind.name == "cpu" else launcher.max_ranks_per_device


def _waits(kind: _Kind) -> str:
    text = f"Waiting for {_NOUNS[kind.name]} that another launcher holds"
    if kind.locks is None:
        return text
    return (
        f"{text} ({kind.locks.holders()}); both take turns (locks in {kind.locks.folder}), and "
        f"this one gives up after {GIVE_UP_S / 3600:g} h with no run at work; "
        "launcher.exclusive_devices=false would share them"
    )
