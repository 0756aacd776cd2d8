"""Whether the checkpoints of a sweep fit on its disk."""

from __future__ import annotations

from collections.abc import Sequence

from batchscape.launch.beginnings import Beginning, find_beginnings, kept_steps
from batchscape.launch.schedule import launch_order
from batchscape.plan.parameters import count_parameters
from batchscape.record.disk import free_bytes
from batchscape.record.folder import CHECKPOINTS_KEPT, SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.state import unsealed
from batchscape.text import size_text

_NUMBERS = 3
"""Of each parameter, in a checkpoint: itself and two moments."""


def disk_warning(specs: Sequence[RunSpec], sweep: SweepFolder) -> str | None:
    """Return a warning where the disk has no room for the checkpoints of concurrent runs.

    Models that only their own code knows, programs, rows and files of W&B are not counted.
    """
    open_specs = unsealed(specs, sweep)
    at_once = max((spec.config.launcher.concurrent_runs for spec in open_specs), default=0)
    sizes = sorted(
        _NUMBERS
        * (8 if spec.precision == "float64" else 4)
        * (count_parameters(spec.config, spec.data) or 0)
        for spec in open_specs
    )
    # One more is written before the oldest is removed; branch points stay until nobody needs them,
    # and others on request, but of cuts that are only timed.
    points = set(find_beginnings(launch_order(open_specs), sweep).values())
    whole_specs = (spec for spec in open_specs if spec.timed_steps is None)
    points |= {Beginning(spec.run_id, step) for spec in whole_specs for step in kept_steps(spec)}
    points = {p for p in points if not sweep.run(p.trunk).branch_point(p.optimizer_steps).exists()}
    states = (CHECKPOINTS_KEPT + 1) * sum(sizes[-at_once:])
    needed, free = states + len(points) * max(sizes, default=0), free_bytes(sweep.path)
    if needed <= free:
        return None
    return (
        f"Checkpoints take {size_text(needed)} at one time, and {size_text(free)} are free: make "
        "space, give a sweep_dir on another disk, a smaller launcher.concurrent_runs, or fewer "
        "checkpoint.keep_at_samples."
    )
