"""A launcher that takes devices and starts nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sweeps_of_fakes import spec_named

from batchscape.config import Local
from batchscape.launch.durations import Durations
from batchscape.launch.placement import Placed, Placement
from batchscape.plan.machine import Machine
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec


class Expected(Durations):
    """Durations by name; one that is missing is unknown."""

    def __init__(self, expected: Mapping[str, float]) -> None:
        self._by_name = expected

    def expected_s(self, spec: RunSpec) -> float | None:
        return self._by_name.get(spec.run_id)


class Launcher:
    """Takes devices as a session does, without starting anything."""

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        *names: str,
        expected: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        device = "cuda" if machine.cuda_devices else "cpu"
        self.queue = deque(spec_named(name, device_type=device, **settings) for name in names)
        launcher = Local("local", device=device, **settings)
        durations = Durations(SweepFolder(folder), ()) if expected is None else Expected(expected)
        self.placement = Placement(machine, launcher, durations, pytest.fail)
        self.active: dict[str, Placed] = {}

    @property
    def devices(self) -> list[int]:
        return [d for placed in self.active.values() if placed.lease for d in placed.lease.devices]

    def start(self) -> set[str]:
        while (placed := self.placement.next(self.queue)) is not None:
            self.active[placed.spec.run_id] = placed
        return set(self.active)

    def end(self, name: str) -> None:
        placed = self.active.pop(name)
        assert placed.lease is not None
        self.placement.release(placed.spec, placed.lease)
