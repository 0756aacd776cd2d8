"""Which run holds which devices: bookkeeping; locks, where there are any, keep others away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from batchscape.errors import LaunchError

__all__ = ["DevicePool", "Lease", "Locks"]


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


class Locks(Protocol):
    """What keeps other launchers off a device."""

    def take(self, device: int) -> bool:
        """Take a device; False while another launcher holds it."""

    def give_back(self, device: int) -> None:
        """Give a device back that was taken."""

    def descriptors(self, devices: Iterable[int]) -> tuple[int, ...]:
        """Return the file descriptors that hold the locks of devices."""


class DevicePool:
    """Devices of one kind, each leased to at most so many runs at a time.

    Parameters
    ----------
    devices : iterable of int
        Numbers of the devices, all different.
    runs_per_device : int
        Runs that may share a device.
    locks : Locks, optional
        Asked for a device before its first run starts, told after its last one has ended.
    """

    def __init__(
        self, devices: Iterable[int], runs_per_device: int = 1, locks: Locks | None = None
    ) -> None:
        self.devices = tuple(devices)
        self.runs_per_device = runs_per_device
        self._locks = locks
        self._room = dict.fromkeys(self.devices, runs_per_device)
        """How many more runs each device takes."""
        self._locked: set[int] = set()
        self._out: Counter[Lease] = Counter()

    @property
    def free(self) -> frozenset[int]:
        """Devices with room for one more run."""
        return frozenset(device for device, room in self._room.items() if room)

    @property
    def idle(self) -> frozenset[int]:
        """Devices that no run of this launcher holds."""
        whole = self.runs_per_device
        return frozenset(device for device, room in self._room.items() if room == whole)

    def width(self, ranks: int) -> int:
        """Return the devices that a run of so many ranks takes."""
        return min(ranks, len(self.devices))

    def check(self, ranks: int, max_ranks_per_device: int = 1) -> None:
        """Refuse a run that could not be placed even on an empty pool.

        Raises
        ------
        LaunchError
            With what would fit.
        """
        count = len(self.devices)
        if ranks > count * max_ranks_per_device:
            msg = (
                f"a run of {ranks} ranks does not fit on {count} devices at "
                f"{max_ranks_per_device} ranks a device; "
                f"at most {count * max_ranks_per_device} ranks fit"
            )
            raise LaunchError(msg)

    def lease(self, ranks: int, max_ranks_per_device: int = 1) -> Lease | None:
        """Take a device for each rank; where there are too few at all, take all of them.

        Idle devices are taken before shared ones, all or none of them.

        Parameters
        ----------
        ranks : int
            Ranks of the run.
        max_ranks_per_device : int
            Ranks of the run that may share a device where the pool is smaller than the run.

        Returns
        -------
        Lease or None
            None while other runs, or other launchers, hold too many devices.

        Raises
        ------
        LaunchError
            If the run could not be placed even on an empty pool.
        """
        self.check(ranks, max_ranks_per_device)
        wanted = self.width(ranks)
        taken: list[int] = []
        if len(self.free) >= wanted:
            # In their order: two launchers that want the same ones meet at the first.
            for device in sorted(self.free, key=lambda d: (-self._room[d], self.devices.index(d))):
                if len(taken) < wanted and self._lock(device):
                    taken.append(device)
        if len(taken) < wanted:
            self._unlock_idle()
            return None
        for device in taken:
            self._room[device] -= 1
        taken.sort(key=self.devices.index)
        held = () if self._locks is None else self._locks.descriptors(taken)
        lease = Lease(tuple(taken), ranks, held)
        self._out[lease] += 1
        return lease

    def release(self, lease: Lease) -> None:
        """Give the devices of a lease back.

        Raises
        ------
        ValueError
            If they are not out on lease.
        """
        if not self._out[lease]:
            msg = f"devices {lease.devices} are not leased; free: {sorted(self.free)}"
            raise ValueError(msg)
        self._out[lease] -= 1
        for device in lease.devices:
            self._room[device] += 1
        self._unlock_idle()

    def taken_by_others(self) -> int:
        """Return the number of devices that other launchers hold now."""
        held = sum(not self._lock(device) for device in self.idle)
        self._unlock_idle()
        return held

    def _lock(self, device: int) -> bool:
        if device not in self._locked and (self._locks is None or self._locks.take(device)):
            self._locked.add(device)
        return device in self._locked

    def _unlock_idle(self) -> None:
        for device in self._locked & self.idle:
            self._locked.discard(device)
            if self._locks is not None:
                self._locks.give_back(device)
