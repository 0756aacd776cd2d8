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
from typing import Any
from uuid import uuid4

from batchscape.plan.machine import Machine
from batchscape.record.locks import (
    EXCLUSIVE_NOWAIT,
    SHARED_NOWAIT,
    Lock,
    is_held,
    public_folder,
    take,
)
from batchscape.record.spec import RunSpec
from batchscape.record.timing import processes_share, runs_share
from batchscape.text import count_text

OTHER_LAUNCHER = "another launcher was at work on this machine"
"""Reason why times are not valid: another launcher worked beside the run."""


LaunchRecord = dict[str, Any]
"""Content of `launch.json`."""


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

    def __exit__(self, *_: object) -> None:
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

    def has_others(self, max_age_s: float = 0.0) -> bool:
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
        lock = take(path, SHARED_NOWAIT, is_public=True)
        if lock is None:
            return True
        lock.release(remove=True)
    return False


@dataclass(frozen=True)
class Lease:
    """Devices that one run holds."""

    devices: tuple[int, ...]
    """Their numbers; rank r uses `devices[r % len(devices)]`."""
    locks: tuple[int, ...] = ()
    """File descriptors that keep other launchers off them; ranks inherit these."""


def launch_record(
    spec: RunSpec, lease: Lease, machine: Machine, *, has_other_launchers: bool
) -> LaunchRecord:
    """Describe how a run is placed, and whether its times can be compared."""
    concurrent = spec.config.launcher.concurrent_runs
    runs_per_device = min(concurrent, spec.config.launcher.runs_per_device)
    # The device numbers of a CPU run are cores.
    is_on_cuda = spec.device_type == "cuda"
    leased_devices = [d for d in machine.cuda_devices if is_on_cuda and d.index in lease.devices]
    ranks = spec.geometry.data_parallel_size
    ranks_text = f"{ranks} ranks"
    cores, cores_text = machine.cpu_cores, f"{machine.cpu_cores} cores"
    devices_text = count_text(len(lease.devices), "CUDA device")
    reasons = {
        processes_share(ranks_text, devices_text): is_on_cuda and ranks > len(lease.devices),
        processes_share(ranks_text, cores_text): ranks > cores,
        runs_share(runs_per_device, "a device"): runs_per_device > 1,
    }
    oversubscribed = any(reasons.values())
    workers = spec.config.loader.workers
    workers_text = count_text(workers, "loader worker") + " each" * (ranks > 1)
    processes = ranks * (1 + workers)
    processes_text = f"{count_text(ranks, 'rank')} with {workers_text}, {processes} processes,"
    reasons |= {
        processes_share(processes_text, cores_text): ranks <= cores < processes,
        runs_share(concurrent, "the machine"): concurrent > 1,
        OTHER_LAUNCHER: has_other_launchers,
    }
    reason = "; ".join(text for text, holds in reasons.items() if holds) or None
    memories = [d.memory_gib for d in leased_devices if d.memory_gib is not None]
    return {
        "world_size": ranks,
        "device_type": spec.device_type,
        "device_model": " + ".join(sorted({d.name for d in leased_devices}))
        if is_on_cuda
        else machine.cpu_name,
        "devices": list(lease.devices),
        # The memory of the host is in environment.json.
        **({"device_memory_gib": min(memories)} if memories else {}),
        "usable_cores": cores,
        "threads_per_rank": 1,
        "concurrent_runs": concurrent,
        "runs_per_device": runs_per_device,
        "oversubscribed": oversubscribed,
        # The follower of jobs asks Slurm by this id how the job ended.
        **({"slurm_job_id": job} if (job := os.environ.get("SLURM_JOB_ID")) else {}),
        "timing_valid": reason is None,
        "timing_invalid_reason": reason,
    }


class DevicePool:
    """Devices of one kind, each leased to at most so many runs at a time.

    The pool locks the devices that runs are on. Where the folder of the locks cannot be used, no
    other launcher is kept off.

    Parameters
    ----------
    kind : str
        `cpu` or `cuda`.
    names : mapping
        Name of a device on the whole machine, by its number here.
    warn : callable
        Takes the warning that there can be no locks, once.
    runs_per_device : int
        Runs that may share a device.
    is_needed : bool
        Whether other launchers may take these devices; else none is kept off.
    """

    def __init__(
        self,
        kind: str,
        names: Mapping[int, str],
        warn: Callable[[str], None],
        *,
        runs_per_device: int = 1,
        is_needed: bool = True,
    ) -> None:
        self.folder = public_folder("batchscape-devices")
        self._kind, self.names, self._warn = kind, names, warn
        self._lock_by_device: dict[int, Lock] = {}
        self._waiting_lock: Lock | None = None
        self._is_usable = is_needed
        self._runs_per_device = runs_per_device
        self._free_slots = dict.fromkeys(names, runs_per_device)
        """Number of runs that each device still takes."""
        self.waits_for_others = False
        """Whether the last lease was refused, and another launcher holds a device."""

    def take(self, device: int) -> bool:
        """Lock a device, if this launcher does not hold it; False while another one holds it."""
        if device not in self._lock_by_device and (
            lock := self._try_lock(self.names[device], EXCLUSIVE_NOWAIT)
        ):
            self._lock_by_device[device] = lock
        return device in self._lock_by_device or not self._is_usable

    def give_back(self, devices: Iterable[int]) -> None:
        """Unlock those of some devices that no run is on."""
        for device in devices:
            if not self._is_used(device) and device in self._lock_by_device:
                self._lock_by_device.pop(device).release()

    def descriptors(self, devices: Iterable[int]) -> tuple[int, ...]:
        """Return the file descriptors that hold the locks of devices."""
        return tuple(
            self._lock_by_device[device].descriptor
            for device in devices
            if device in self._lock_by_device
        )

    def show_waiting(self, is_waiting: bool) -> None:
        """Let other launchers know whether this one waits for devices."""
        if self._waiting_lock is not None and not is_waiting:
            self._waiting_lock.release()
            self._waiting_lock = None
        elif self._waiting_lock is None and is_waiting:
            self._waiting_lock = self._try_lock("waiting", SHARED_NOWAIT)

    def others_wait(self) -> bool:
        """Whether another launcher waits for devices; call it only while this one does not."""
        return self._is_usable and is_held(self._path("waiting"))

    def lease(self, ranks: int) -> Lease | None:
        """Take devices for a run, those with the fewest runs first: all that it needs, or none.

        A run needs one a rank, or all there are, which its ranks share.

        Returns
        -------
        Lease or None
            None while other runs, or other launchers, hold too many of them.
        """
        width = min(ranks, len(self.names))
        devices, devices_elsewhere = list[int](), list[int]()
        for device in sorted(self.names, key=lambda device: -self._free_slots[device]):
            if len(devices) < width and self._free_slots[device]:
                is_ours = self._is_used(device) or self.take(device)
                (devices if is_ours else devices_elsewhere).append(device)
        self.waits_for_others = len(devices) < width and bool(devices_elsewhere)
        if len(devices) < width:
            names = sorted(self.names[device] for device in devices_elsewhere)
            self.give_back(d for d in devices if names and self.names[d] > names[0])
            return None
        for device in devices:
            self._free_slots[device] -= 1
        self.give_back(self.names)
        in_order = tuple(device for device in self.names if device in devices)
        return Lease(in_order, self.descriptors(in_order))

    def release(self, lease: Lease) -> None:
        """Give the devices of a lease back."""
        for device in lease.devices:
            self._free_slots[device] += 1
        self.give_back(lease.devices)

    def close(self) -> None:
        """Give back devices that no run is on, and wait for none."""
        self.waits_for_others = False
        self.give_back(self.names)
        self.show_waiting(False)

    def _is_used(self, device: int) -> bool:
        return self._free_slots[device] < self._runs_per_device

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._kind}-{name}"

    def _try_lock(self, name: str, kind: int) -> Lock | None:
        if not self._is_usable:
            return None
        try:
            return take(self._path(name), kind, is_public=True)
        except OSError as error:
            self._is_usable = False
            self._warn(
                f"devices cannot be locked in {self.folder}: launchers on this machine may use the "
                f"same ones at the same time ({error})"
            )
            return None
