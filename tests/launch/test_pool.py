from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchscape.errors import LaunchError
from batchscape.launch.pool import DevicePool, Lease


class Held:
    """Locks, of this launcher and of others; a descriptor is the number of its device."""

    def __init__(self) -> None:
        self.ours: set[int] = set()
        self.theirs: set[int] = set()

    def take(self, device: int) -> bool:
        assert device not in self.ours
        if device in self.theirs:
            return False
        self.ours.add(device)
        return True

    def give_back(self, device: int) -> None:
        self.ours.remove(device)

    def descriptors(self, devices: Iterable[int]) -> tuple[int, ...]:
        assert set(devices) <= self.ours
        return tuple(devices)


class Pool(RuleBasedStateMachine):
    """Leases and releases in any order, against the plain sets of devices that are out."""

    @initialize(
        devices=st.sets(st.integers(0, 20), min_size=1, max_size=6),
        shares=st.integers(1, 3),
        locked=st.booleans(),
    )
    def create(self, devices: set[int], shares: int, locked: bool) -> None:
        self.devices, self.shares = devices, shares
        self.locks, self.locked = Held(), locked
        self.pool = DevicePool(sorted(devices), shares, self.locks if locked else None)
        self.out: list[Lease] = []

    @property
    def taken(self) -> list[int]:
        return [device for lease in self.out for device in lease.devices]

    def may_have(self, device: int) -> bool:
        return not self.locked or device not in self.locks.theirs

    @rule(ranks=st.integers(1, 14), per_device=st.integers(1, 3))
    def lease(self, ranks: int, per_device: int) -> None:
        held = Counter(self.taken)
        free = sum(self.may_have(d) and held[d] < self.shares for d in self.devices)
        if ranks > len(self.devices) * per_device:
            with pytest.raises(LaunchError, match=f"at most {len(self.devices) * per_device} rank"):
                self.pool.lease(ranks, per_device)
            return
        lease = self.pool.lease(ranks, per_device)
        if free < min(ranks, len(self.devices)):
            assert lease is None
            return
        assert lease is not None
        assert len(set(lease.devices)) == len(lease.devices) == min(ranks, len(self.devices))
        assert lease.ranks == ranks
        assert lease.oversubscribed == (ranks > len(self.devices))
        # The emptiest devices, so that runs share only where they must.
        rest = [held[d] for d in self.devices - set(lease.devices) if self.may_have(d)]
        assert max(held[d] for d in lease.devices) <= min(rest, default=self.shares)
        assert lease.locks == (tuple(lease.devices) if self.locked else ())
        self.out.append(lease)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.out:
            lease = data.draw(st.sampled_from(self.out))
            self.out.remove(lease)
            self.pool.release(lease)
            if lease not in self.out:
                with pytest.raises(ValueError, match="not leased"):
                    self.pool.release(lease)

    @rule(data=st.data())
    def others_come_and_go(self, data: st.DataObject) -> None:
        if hasattr(self, "pool"):
            free = sorted(self.devices - self.locks.ours)
            self.locks.theirs = set(data.draw(st.lists(st.sampled_from(free)))) if free else set()
            expected = len(self.locks.theirs) if self.locked else 0
            assert self.pool.taken_by_others() == expected

    @invariant()
    def nothing_is_leased_twice(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = Counter(self.taken)
        assert max(held.values(), default=0) <= self.shares
        assert self.pool.free == {d for d in self.devices if held[d] < self.shares}
        assert self.pool.idle == self.devices - set(held)
        if self.locked:
            # Locked while a run is on it, and no longer.
            assert self.locks.ours == set(held)


TestPool = Pool.TestCase


def test_foreign_devices_cannot_be_released() -> None:
    with pytest.raises(ValueError, match="not leased"):
        DevicePool([0, 1]).release(Lease((7,), 1))
