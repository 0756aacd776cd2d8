"""Which run holds which devices. Pure bookkeeping: it starts and touches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchscape.errors import LaunchError

__all__ = ["DevicePool", "Lease"]


@dataclass(frozen=True)
class Lease:
    """Devices that one run holds."""

    devices: tuple[int, ...]
    """Their numbers; rank r uses `devices[r % len(devices)]`."""
    ranks: int
    """Ranks of the run."""

    @property
    def oversubscribed(self) -> bool:
        """Whether ranks share devices."""
        return self.ranks > len(self.devices)


class DevicePool:
    """Devices of one kind, each leased to at most one run at a time.

    Parameters
    ----------
    devices : iterable of int
        Numbers of the devices, all different.
    """

    def __init__(self, devices: Iterable[int]) -> None:
        self._devices = tuple(devices)
        self._free = set(self._devices)

    @property
    def free(self) -> frozenset[int]:
        """Devices that no run holds."""
        return frozenset(self._free)

    def lease(self, ranks: int, max_ranks_per_device: int = 1) -> Lease | None:
        """Take a device for each rank; where there are too few at all, take all of them.

        Parameters
        ----------
        ranks : int
            Ranks of the run.
        max_ranks_per_device : int
            Ranks that may share a device where the pool is smaller than the run.

        Returns
        -------
        Lease or None
            None while other runs hold too many devices.

        Raises
        ------
        LaunchError
            If the run could not be placed even on an empty pool.
        """
        count = len(self._devices)
        if ranks > count * max_ranks_per_device:
            msg = (
                f"a run of {ranks} ranks does not fit on {count} devices at "
                f"{max_ranks_per_device} ranks a device; "
                f"at most {count * max_ranks_per_device} ranks fit"
            )
            raise LaunchError(msg)
        wanted = min(ranks, count)
        if len(self._free) < wanted:
            return None
        taken = tuple(device for device in self._devices if device in self._free)[:wanted]
        self._free.difference_update(taken)
        return Lease(taken, ranks)

    def release(self, lease: Lease) -> None:
        """Give the devices of a lease back.

        Raises
        ------
        ValueError
            If they are not out on lease.
        """
        if not self._free.isdisjoint(lease.devices) or not set(lease.devices) <= set(self._devices):
            msg = f"devices {lease.devices} are not leased; free: {sorted(self._free)}"
            raise ValueError(msg)
        self._free.update(lease.devices)
