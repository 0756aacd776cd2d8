"""A launcher that takes devices and starts nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest
from sweeps_of_fakes import spec_named

from batchscape.launch.devices import Lease
from batchscape.launch.placement import Placement
from batchscape.plan.machine import Machine
from batchscape.record.spec import RunSpec


class Placer:
    """Takes devices as a launcher does, without starting anything."""

    def __init__(
        self,
        machine: Machine,
        *specs: str | RunSpec,
        expected: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        device = "cuda" if machine.cuda_devices else "cpu"
        self.queue = deque(
            spec_named(spec, device_type=device, **settings) if isinstance(spec, str) else spec
            for spec in specs
        )
        predicted = {
            name: {"run_time_s": {"method": "planted", "value": seconds}}
            for name, seconds in (expected or {}).items()
        }
        self.placement = Placement(self.queue[0], machine, predicted, pytest.fail)
        self.active: dict[str, tuple[RunSpec, Lease]] = {}

    @property
    def devices(self) -> list[int]:
        return [device for _, lease in self.active.values() for device in lease.devices]

    def start(self) -> set[str]:
        while (placed := self.placement.next(self.queue)) is not None:
            self.active[placed[0].run_id] = placed
        return set(self.active)

    def end(self, name: str) -> None:
        spec, _ = self.active.pop(name)
        self.placement.release(spec)
