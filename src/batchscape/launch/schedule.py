"""The order in which runs start, and how long a queue takes."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence

from batchscape.record.spec import RunSpec


def launch_order(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Order runs at random within blocks of equal seeds.

    Every block holds each geometry once, so that a drift of the machine falls equally on all. The
    order of two runs does not depend on the others: runs that are added change nothing.

    Parameters
    ----------
    specs : sequence of RunSpec
    """

    def key(spec: RunSpec) -> tuple[int, int, int, str]:
        config = spec.config
        digest = hashlib.sha256(spec.run_id.encode()).hexdigest()
        seeds = config.resolved_init_seed, config.resolved_data_seed
        return (config.timing_repeat, *seeds, digest)

    return sorted(specs, key=key)


def makespan_s(
    runs: Iterable[tuple[int, float]],
    devices: int,
    concurrent_runs: int,
    runs_per_device: int = 1,
) -> float:
    """Return how long a strict queue takes, from the first start to the last end.

    Each run starts as soon as the run before it has started and there is room for it.

    Parameters
    ----------
    runs : iterable of (int, float)
        Ranks and seconds of each run, in the order of the starts.
    devices : int
        A run takes one for each rank, or all.
    concurrent_runs : int
        Number of runs at the same time.
    runs_per_device : int
        Runs that may share a device.
    """
    now_s, free_slots, running = 0.0, devices * runs_per_device, 0
    ends: list[tuple[float, int]] = []
    for ranks, seconds in runs:
        width = min(ranks, devices)
        while free_slots < width or running >= concurrent_runs:
            now_s, freed_slots = heapq.heappop(ends)
            free_slots, running = free_slots + freed_slots, running - 1
        heapq.heappush(ends, (now_s + seconds, width))
        free_slots, running = free_slots - width, running + 1
    return max((end for end, _ in ends), default=0.0)
