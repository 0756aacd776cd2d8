from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchscape.launch.devices import DevicePool, Lease


class Held(DevicePool):
    """Locks, of this launcher and of others; a descriptor is the number of its device."""

    def __init__(self, devices: Iterable[int], shares: int) -> None:
        names = {device: f"{device:02}" for device in devices}
        super().__init__("cpu", names, pytest.fail, runs_per_device=shares)
        self.ours: set[int] = set()
        self.theirs: set[int] = set()

    def take(self, device: int) -> bool:
        if device in self.theirs:
            return False
        self.ours.add(device)
        return True

    def give_back(self, devices: Iterable[int]) -> None:
        self.ours -= {device for device in devices if not self._is_used(device)}

    def descriptors(self, devices: Iterable[int]) -> tuple[int, ...]:
        assert set(devices) <= self.ours
        return tuple(devices)


class Pool(RuleBasedStateMachine):
    """Leases and releases in any order, against the plain sets of devices that are out."""

    @initialize(
        devices=st.sets(st.integers(0, 20), min_size=1, max_size=6),
        shares=st.integers(1, 3),
    )
    def create(self, devices: set[int], shares: int) -> None:
        self.devices, self.shares = devices, shares
        self.pool = Held(sorted(devices), shares)
        self.out: list[Lease] = []

    @property
    def taken(self) -> list[int]:
        return [device for lease in self.out for device in lease.devices]

    def may_have(self, device: int) -> bool:
        return device not in self.pool.theirs

    @rule(ranks=st.integers(1, 14))
    def lease(self, ranks: int) -> None:
        held = Counter(self.taken)
        free = {d for d in self.devices if self.may_have(d) and held[d] < self.shares}
        elsewhere = {d for d in self.devices if not self.may_have(d)}
        lease = self.pool.lease(ranks)
        if len(free) < min(ranks, len(self.devices)):
            assert lease is None
            assert self.pool.waits_for_others == bool(elsewhere)
            kept = {d for d in free if d < min(elsewhere, default=99)}
            assert self.pool.ours == set(held) | kept
            return
        assert lease is not None
        assert len(set(lease.devices)) == len(lease.devices) == min(ranks, len(self.devices))
        assert set(lease.devices) <= free
        # The emptiest devices, so that runs share only where they must.
        rest = [held[d] for d in free - set(lease.devices)]
        assert max(held[d] for d in lease.devices) <= min(rest, default=self.shares)
        assert lease.locks == tuple(lease.devices)
        self.out.append(lease)
        self.nothing_is_kept()

    @rule()
    def close(self) -> None:
        self.pool.close()
        self.nothing_is_kept()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.out:
            lease = data.draw(st.sampled_from(self.out))
            self.out.remove(lease)
            self.pool.release(lease)
            assert not self.pool.ours & set(lease.devices) - set(self.taken)

    @rule(data=st.data())
    def others_come_and_go(self, data: st.DataObject) -> None:
        if hasattr(self, "pool"):
            free = sorted(self.devices - self.pool.ours)
            self.pool.theirs = set(data.draw(st.lists(st.sampled_from(free)))) if free else set()

    @invariant()
    def nothing_is_leased_twice(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = Counter(self.taken)
        assert max(held.values(), default=0) <= self.shares

    def nothing_is_kept(self) -> None:
        """Devices are locked while a run is on them, and no longer."""
        assert self.pool.ours == set(self.taken)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=40)
