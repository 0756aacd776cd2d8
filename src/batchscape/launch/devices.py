"""Which run holds which devices of this machine, beside those that other launchers hold.

Each device has a file in one folder for all users, named by the UUID of a CUDA device or by the
number of a core. A launcher that holds the lock on the file holds the device. Ranks inherit the
lock, so that ranks that outlive a killed launcher still hold their devices. The files are never
removed, as two launchers could then lock two files of one name.

Where a run needs more devices than are free, its launcher keeps those whose names come before all
that other launchers hold, and gives back the others. So no two launchers wait for each other, and a
wide run gathers its devices while narrow ones come and go. A launcher that waits holds a shared
lock on one more file; launchers that see it pause after the end of a run (`placement.py`).

Launchers spoil each other's times, and find each other by a second folder, where each holds a lock
on a file of its own while it has runs at work. A lock ends with its process, however that ends; a
file without a lock is left from a launcher that was killed.

The folders are in the temporary folder, which `TMPDIR` names: launchers with different ones do not
see each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from batchscape.record.locks import AT_ONCE, BESIDE, Lock, is_held, public_folder, take
from batchscape.record.spec import RunSpec
from batchscape.record.timing import processes_share, runs_share
from batchscape.text import count_text

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine


OTHER_LAUNCHER = "another launcher was at work on this machine"
"""Why the times of a run are not valid that had another launcher beside it."""


class Presence:
    """Shows this launcher to others while it is entered, and finds them.

    A launcher that only waits for devices hides: it disturbs no run. Where the folder cannot be
    used, no launcher is shown and none is found.
    """

    def __init__(self) -> None:
        self._folder = public_folder("batchscape-launchers")
        self._lock: Lock | None = None
        self._looked_at = float("-inf")
        self._has_others = False

    def __enter__(self) -> Presence:
        self.show()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hide()

    def show(self) -> None:
        """Let others know that this launcher is at work, if they do not."""
        with suppress(OSError):
            # A launcher that looks holds a file for an instant; then another name is tried.
            while self._lock is None:
                self._lock = take(self._folder / uuid4().hex, is_public=True)

    def hide(self) -> None:
        """Let others know that this launcher does nothing."""
        if self._lock is not None:
            with suppress(OSError):
                self._lock.release(remove=True)
            self._lock = None

    def others(self, max_age_s: float = 0.0) -> bool:
        """Return whether another launcher is at work.

        Parameters
        ----------
        max_age_s : float
            How old the answer may be, in seconds.
        """
        now = time.monotonic()
        if now - self._looked_at >= max_age_s:
            self._looked_at, self._has_others = now, False
            own_path = None if self._lock is None else self._lock.path
            with suppress(OSError):
                others = [path for path in self._folder.iterdir() if path != own_path]
                self._has_others = any(map(_is_launcher_alive, others))
        return self._has_others


def _is_launcher_alive(path: Path) -> bool:
    """Whether a launcher lives that holds the file; a file that nobody holds is removed."""
    with suppress(OSError):
        lock = take(path, BESIDE, is_public=True)
        if lock is None:
            return True
        lock.release(remove=True)
    return False


@dataclass(frozen=True)
class Lease:
    """Devices that one run holds."""

    devices: tuple[int, ...]
    """Their numbers; rank r uses `devices[r % len(devices)]`."""
    ranks: int
    """Ranks of the run."""
    locks: tuple[int, ...] = ()
    """File descriptors that keep other launchers off them; ranks inherit these."""

    @property
    def oversubscribed(self) -> bool:
        """Whether ranks share devices."""
        return self.ranks > len(self.devices)


def launch_record(spec: RunSpec, lease: Lease, machine: Machine, *, others: bool) -> dict[str, Any]:
    """Describe how a run is placed, and whether its times can be compared."""
    concurrent = spec.config.launcher.concurrent_runs
    sharing = min(concurrent, spec.config.launcher.runs_per_device)
    # The device numbers of a CPU run are cores.
    leased = [d for d in machine.cuda_devices if d.index in lease.devices]
    leased = leased if spec.device_type == "cuda" else []
    why = []
    if lease.oversubscribed and spec.device_type == "cuda":
        devices = count_text(len(lease.devices), "CUDA device")
        why.append(processes_share(f"{lease.ranks} ranks", devices))
    if lease.ranks > machine.cpu_cores:
        why.append(processes_share(f"{lease.ranks} ranks", f"{machine.cpu_cores} cores"))
    if sharing > 1:
        why.append(runs_share(sharing, "a device"))
    oversubscribed = bool(why)
    workers = spec.config.loader.workers
    if workers and lease.ranks <= machine.cpu_cores < (processes := lease.ranks * (1 + workers)):
        ranks, each = count_text(lease.ranks, "rank"), " each" * (lease.ranks > 1)
        why.append(
            processes_share(
                f"{ranks} with {count_text(workers, 'loader worker')}{each}, "
                f"{processes} processes,",
                f"{machine.cpu_cores} cores",
            )
        )
    if concurrent > 1:
        why.append(runs_share(concurrent, "the machine"))
    if others:
        why.append(OTHER_LAUNCHER)
    memories = [d.memory_gib for d in leased if d.memory_gib is not None]
    return {
        "world_size": lease.ranks,
        "device_type": spec.device_type,
        "device_model": " + ".join(sorted({d.name for d in leased}))
        if spec.device_type == "cuda"
        else machine.cpu_name,
        "devices": list(lease.devices),
        # The memory of the host is in environment.json.
        **({"device_memory_gib": min(memories)} if memories else {}),
        "usable_cores": machine.cpu_cores,
        "threads_per_rank": 1,
        "concurrent_runs": concurrent,
        "runs_per_device": sharing,
        "oversubscribed": oversubscribed,
        # The follower of jobs asks Slurm by this id how the job ended.
        **({"slurm_job_id": job} if (job := os.environ.get("SLURM_JOB_ID")) else {}),
        "timing_valid": not why,
        "timing_invalid_reason": "; ".join(why) or None,
    }


class DeviceLocks:
    """Locks on the devices of one kind. Where the folder cannot be used, no launcher is kept off.

    Parameters
    ----------
    kind : str
        `cpu` or `cuda`.
    names : mapping
        Name of a device on the whole machine, by its number here.
    warn : callable
        Takes the warning that there can be no locks, once.
    is_needed : bool
        Whether other launchers may take these devices; else none is kept off.
    """

    def __init__(
        self,
        kind: str,
        names: Mapping[int, str],
        warn: Callable[[str], None],
        *,
        is_needed: bool = True,
    ) -> None:
        self.folder = public_folder("batchscape-devices")
        self._kind, self.names, self._warn = kind, names, warn
        self._held: dict[int, Lock] = {}
        self._waiting: Lock | None = None
        self._usable = is_needed

    def take(self, device: int) -> bool:
        """Take a device, if this launcher does not hold it; False while another one holds it."""
        if device not in self._held and (lock := self._try_lock(self.names[device], AT_ONCE)):
            self._held[device] = lock
        return device in self._held or not self._usable

    def give_back(self, device: int) -> None:
        """Give back a device, if this launcher holds it."""
        if (lock := self._held.pop(device, None)) is not None:
            lock.release()

    def descriptors(self, devices: Iterable[int]) -> tuple[int, ...]:
        """Return the file descriptors that hold the locks of devices."""
        return tuple(self._held[device].descriptor for device in devices if device in self._held)

    def show_waiting(self, is_waiting: bool) -> None:
        """Let other launchers know whether this one waits for devices."""
        if self._waiting is not None and not is_waiting:
            self._waiting.release()
            self._waiting = None
        elif self._waiting is None and is_waiting:
            self._waiting = self._try_lock("waiting", BESIDE)

    def others_wait(self) -> bool:
        """Return whether another launcher waits for devices; this one must not."""
        return self._usable and is_held(self._path("waiting"))

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._kind}-{name}"

    def _try_lock(self, name: str, kind: int) -> Lock | None:
        if not self._usable:
            return None
        try:
            return take(self._path(name), kind, is_public=True)
        except OSError as error:
            self._usable = False
            self._warn(
                f"devices cannot be locked in {self.folder}: launchers on this machine may use the "
                f"same ones at the same time ({error})"
            )
            return None


class DevicePool:
    """Devices of one kind, each leased to at most so many runs at a time.

    Parameters
    ----------
    locks : DeviceLocks
        Of these devices; keeps other launchers off those that runs are on.
    runs_per_device : int
        Runs that may share a device.
    """

    def __init__(self, locks: DeviceLocks, runs_per_device: int = 1) -> None:
        self.devices = tuple(locks.names)
        self._locks = locks
        self._room = dict.fromkeys(self.devices, runs_per_device)
        """How many more runs each device takes."""
        self._runs_per_device = runs_per_device
        self.waits_for_others = False
        """Whether the last lease was refused, and another launcher holds a device."""

    def lease(self, ranks: int) -> Lease | None:
        """Take devices for a run, those with the fewest runs first: all that it needs, or none.

        A run needs one a rank, or all there are, which its ranks share.

        Returns
        -------
        Lease or None
            None while other runs, or other launchers, hold too many of them.
        """
        width = min(ranks, len(self.devices))
        devices, elsewhere = list[int](), list[int]()
        for device in sorted(self.devices, key=lambda device: -self._room[device]):
            if len(devices) < width and self._room[device]:
                is_ours = self._is_used(device) or self._locks.take(device)
                (devices if is_ours else elsewhere).append(device)
        self.waits_for_others = len(devices) < width and bool(elsewhere)
        if len(devices) < width:
            names = self._locks.names
            first = min((names[device] for device in elsewhere), default=None)
            self._unlock_unused(d for d in devices if first is not None and names[d] > first)
            return None
        for device in devices:
            self._room[device] -= 1
        self._unlock_unused(self.devices)
        devices.sort(key=self.devices.index)
        return Lease(tuple(devices), ranks, self._locks.descriptors(devices))

    def release(self, lease: Lease) -> None:
        """Give the devices of a lease back.

        Raises
        ------
        ValueError
            If no run holds one of them.
        """
        if not all(map(self._is_used, lease.devices)):
            msg = f"devices {lease.devices} are not leased"
            raise ValueError(msg)
        for device in lease.devices:
            self._room[device] += 1
        self._unlock_unused(lease.devices)

    def close(self) -> None:
        """Give back devices that no run is on."""
        self.waits_for_others = False
        self._unlock_unused(self.devices)

    def _is_used(self, device: int) -> bool:
        return self._room[device] < self._runs_per_device

    def _unlock_unused(self, devices: Iterable[int]) -> None:
        for device in devices:
            if not self._is_used(device):
                self._locks.give_back(device)
