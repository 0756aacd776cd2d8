from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchscape.errors import LaunchError
from batchscape.launch.pool import DevicePool, Lease


class Pool(RuleBasedStateMachine):
    """Leases and releases in any order, against the plain sets of devices that are out."""

    @initialize(devices=st.sets(st.integers(0, 20), min_size=1, max_size=6))
    def create(self, devices: set[int]) -> None:
        self.devices = devices
        self.pool = DevicePool(sorted(devices))
        self.out: list[Lease] = []

    @property
    def taken(self) -> list[int]:
        return [device for lease in self.out for device in lease.devices]

    @rule(ranks=st.integers(1, 14), per_device=st.integers(1, 3))
    def lease(self, ranks: int, per_device: int) -> None:
        free = len(self.devices) - len(self.taken)
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
        self.out.append(lease)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.out:
            lease = data.draw(st.sampled_from(self.out))
            self.out.remove(lease)
            self.pool.release(lease)
            with pytest.raises(ValueError, match="not leased"):
                self.pool.release(lease)

    @invariant()
    def nothing_is_leased_twice(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert len(self.taken) == len(set(self.taken))
        assert self.pool.free == self.devices - set(self.taken)


TestPool = Pool.TestCase


def test_foreign_devices_cannot_be_released() -> None:
    with pytest.raises(ValueError, match="not leased"):
        DevicePool([0, 1]).release(Lease((7,), 1))
