"""Which run holds which devices of this machine, beside what other launchers hold.

Each device has a file in one folder for all users, named by the UUID of a CUDA device or by the
number of a core. Who holds the lock on the file holds the device. Ranks inherit the lock, so that
ranks that outlive a killed launcher still hold their devices. Nobody removes the files, as two
launchers could then lock two files of one name.

Where a run needs more devices than are free, its launcher keeps those whose names come before all
that other launchers hold, and gives back the others. So no two launchers wait for each other, and a
wide run gathers its devices while narrow ones come and go. A launcher that waits holds a shared
lock on one more file; who sees it pauses after the end of a run (`placement.py`).

The folder is in the temporary folder, which `TMPDIR` names: launchers with different ones do not
see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from batchscape.record.locks import AT_ONCE, BESIDE, Lock, is_held, public_folder, take

__all__ = ["DeviceLocks", "DevicePool", "Lease"]


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


class DeviceLocks:
    """Locks on the devices of one kind. Where the folder cannot be used, nobody is kept away.

    Parameters
    ----------
    kind : str
        `cpu` or `cuda`.
    names : mapping
        What a device is called on the whole machine, by its number here.
    warn : callable
        Told once, in words, when there can be no locks.
    """

    def __init__(self, kind: str, names: Mapping[int, str], warn: Callable[[str], None]) -> None:
        self.folder = public_folder("batchscape-devices")
        self._kind, self.names, self._warn = kind, names, warn
        self._held: dict[int, Lock] = {}
        self._waiting: Lock | None = None
        self._usable = True

    def take(self, device: int) -> bool:
        """Take a device; False while another launcher holds it."""
        lock = self._try(self.names[device], AT_ONCE)
        if lock is not None:
            self._held[device] = lock
        return lock is not None or not self._usable

    def give_back(self, device: int) -> None:
        """Give a device back that was taken."""
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
            self._waiting = self._try("waiting", BESIDE)

    @property
    def others_wait(self) -> bool:
        """Whether another launcher waits for devices; this one must not."""
        return self._usable and is_held(self._path("waiting"))

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._kind}-{name}"

    def _try(self, name: str, kind: int) -> Lock | None:
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
    devices : iterable of int
        Numbers of the devices, all different.
    runs_per_device : int
        Runs that may share a device.
    locks : DeviceLocks, optional
        Keeps other launchers off the devices that runs are on.
    """

    def __init__(
        self, devices: Iterable[int], runs_per_device: int = 1, locks: DeviceLocks | None = None
    ) -> None:
        self.devices = tuple(devices)
        self._locks = locks
        self._room = dict.fromkeys(self.devices, runs_per_device)
        """How many more runs each device takes."""
        self._runs_per_device = runs_per_device
        self._locked: set[int] = set()
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
        devices, elsewhere = list[int](), set[int]()
        for device in sorted(self.devices, key=lambda device: -self._room[device]):
            if len(devices) < width and self._room[device]:
                (devices.append if self._lock(device) else elsewhere.add)(device)
        self.waits_for_others = len(devices) < width and bool(elsewhere)
        if len(devices) < width:
            self._unlock_idle(keep=frozenset(self._before(elsewhere)))
            return None
        for device in devices:
            self._room[device] -= 1
        self._unlock_idle()
        devices.sort(key=self.devices.index)
        locks = () if self._locks is None else self._locks.descriptors(devices)
        return Lease(tuple(devices), ranks, locks)

    def release(self, lease: Lease) -> None:
        """Give the devices of a lease back.

        Raises
        ------
        ValueError
            If no run holds one of them.
        """
        if any(self._room[device] == self._runs_per_device for device in lease.devices):
            msg = f"devices {lease.devices} are not leased"
            raise ValueError(msg)
        for device in lease.devices:
            self._room[device] += 1
        self._unlock_idle(keep=self._locked.difference(lease.devices))

    def close(self) -> None:
        """Give back devices that no run is on."""
        self.waits_for_others = False
        self._unlock_idle()

    def _lock(self, device: int) -> bool:
        if device not in self._locked and (self._locks is None or self._locks.take(device)):
            self._locked.add(device)
        return device in self._locked

    def _before(self, elsewhere: Collection[int]) -> Collection[int]:
        """Return the devices named before all that other launchers hold."""
        if self._locks is None or not elsewhere:
            return self.devices
        names = self._locks.names
        first = min(names[device] for device in elsewhere)
        return [device for device in self.devices if names[device] < first]

    def _unlock_idle(self, keep: Collection[int] = ()) -> None:
        for device in self._locked.difference(keep):
            if self._room[device] == self._runs_per_device:
                self._locked.discard(device)
                if self._locks is not None:
                    self._locks.give_back(device)
