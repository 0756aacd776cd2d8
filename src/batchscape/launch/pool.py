"""Which run holds which devices: bookkeeping; locks, where there are any, keep others away."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

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
        self._locks = locks
        self._room = dict.fromkeys(self.devices, runs_per_device)
        """How many more runs each device takes."""
        self._all = runs_per_device
        self._locked: set[int] = set()

    def width(self, ranks: int) -> int:
        """Return the devices that a run takes: one a rank, or all there are, which ranks share."""
        return min(ranks, len(self.devices))

    def available(self) -> frozenset[int]:
        """Return the devices with room for one more run that no other launcher holds."""
        found = frozenset(d for d, room in self._room.items() if room and self._lock(d))
        self._unlock_idle()
        return found

    def lease(self, ranks: int, among: Collection[int] | None = None) -> Lease | None:
        """Take devices for a run, those with the fewest runs first: all that it needs, or none.

        Parameters
        ----------
        ranks : int
        among : collection of int, optional
            Devices that it may have; by default all.

        Returns
        -------
        Lease or None
            None while other runs, or other launchers, hold too many of them.
        """
        wanted, taken = self.width(ranks), list[int]()
        # In their order: two launchers that want the same ones meet at the first.
        for device in sorted(self.devices, key=lambda device: -self._room[device]):
            may = self._room[device] and (among is None or device in among)
            if len(taken) < wanted and may and self._lock(device):
                taken.append(device)
        if len(taken) < wanted:
            self._unlock_idle()
            return None
        for device in taken:
            self._room[device] -= 1
        taken.sort(key=self.devices.index)
        held = () if self._locks is None else self._locks.descriptors(taken)
        return Lease(tuple(taken), ranks, held)

    def release(self, lease: Lease) -> None:
        """Give the devices of a lease back.

        Raises
        ------
        ValueError
            If no run holds one of them.
        """
        if any(self._room[device] == self._all for device in lease.devices):
            msg = f"devices {lease.devices} are not leased"
            raise ValueError(msg)
        for device in lease.devices:
            self._room[device] += 1
        self._unlock_idle()

    def _lock(self, device: int) -> bool:
        if device not in self._locked and (self._locks is None or self._locks.take(device)):
            self._locked.add(device)
        return device in self._locked

    def _unlock_idle(self) -> None:
        for device in [d for d in self._locked if self._room[d] == self._all]:
            self._locked.discard(device)
            if self._locks is not None:
                self._locks.give_back(device)
