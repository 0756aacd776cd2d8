"""Whether times are called valid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from batchscape.cuda_devices import CudaDevice
from batchscape.launch.devices import Lease, launch_record
from batchscape.plan.machine import Machine
from batchscape.record.spec import RunSpec
from batchscape.record.timing import is_beside_others, is_mended_by_repeating


@pytest.mark.parametrize(
    ("ranks", "workers", "reason"),
    [
        (2, 1, None),
        (4, 0, None),
        (1, 4, "1 rank with 4 loader workers, 5 processes, share 4 cores"),
        (2, 2, "2 ranks with 2 loader workers each, 6 processes, share 4 cores"),
        (5, 1, "5 ranks share 4 cores"),
    ],
)
def test_loader_workers_count_against_the_cores(
    spec_of: Callable[..., RunSpec], ranks: int, workers: int, reason: str | None
) -> None:
    machine = Machine(cpu_cores=4, cpu_name="a processor", cuda_devices=())
    spec = spec_of((ranks, 2, 1), loader={"workers": workers})
    record = launch_record(
        spec, Lease(tuple(range(min(ranks, 4)))), machine, has_other_launchers=False
    )
    assert record["timing_invalid_reason"] == reason
    assert record["timing_valid"] == (reason is None)
    assert reason is None or not is_mended_by_repeating(reason)


@pytest.mark.parametrize(
    ("concurrent", "shares", "reasons"),
    [
        (1, 1, []),
        # One at a time, nobody shares, whatever is allowed.
        (1, 4, []),
        (3, 1, ["up to 3 runs share the machine"]),
        (3, 2, ["up to 2 runs share a device", "up to 3 runs share the machine"]),
        (2, 4, ["up to 2 runs share a device", "up to 2 runs share the machine"]),
    ],
)
def test_runs_that_share_a_device_are_marked(
    spec_of: Callable[..., RunSpec], concurrent: int, shares: int, reasons: list[str]
) -> None:
    machine = Machine(cpu_cores=4, cpu_name="a processor")
    launcher = {
        "name": "local",
        "device": "cpu",
        "concurrent_runs": concurrent,
        "oversubscribe": shares,
    }
    record = launch_record(
        spec_of((1, 2, 1), launcher=launcher), Lease((0,)), machine, has_other_launchers=False
    )
    assert (record["timing_invalid_reason"] or "").split("; ") == (reasons or [""])
    assert all(is_beside_others(reason) for reason in reasons)
    assert is_mended_by_repeating("; ".join(reasons))
    assert record["timing_valid"] == (not reasons)
    assert record["oversubscribed"] == any("share a device" in reason for reason in reasons)
    assert record["runs_per_device"] == min(concurrent, shares)


def test_ranks_that_share_cuda_devices_are_marked(spec_of: Callable[..., RunSpec]) -> None:
    devices = tuple(CudaDevice(i, "GPU model", (9, 0), f"GPU-{i}") for i in (0, 2))
    machine = Machine(cpu_cores=4, cpu_name="a processor", cuda_devices=devices)
    spec = replace(spec_of((5, 2, 1)), device_type="cuda")
    record = launch_record(spec, Lease((0, 2)), machine, has_other_launchers=False)
    assert (record["devices"], record["oversubscribed"]) == ([0, 2], True)
    assert record["timing_invalid_reason"] == "5 ranks share 2 CUDA devices; 5 ranks share 4 cores"
    spec = replace(spec_of((2, 2, 1)), device_type="cuda")
    record = launch_record(spec, Lease((0, 2)), machine, has_other_launchers=False)
    assert (record["oversubscribed"], record["timing_valid"]) == (False, True)
