"""A job: a launcher inside its allocation, which shares the runs of a sweep with others."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from batchscape.errors import BatchscapeError
from batchscape.launch.launcher import Launcher
from batchscape.launch.slurm.nodes import open_nodes
from batchscape.launch.slurm.order import QUEUE_AGAIN, JobOrder, Shape
from batchscape.outgoing import outgoing
from batchscape.plan.machine import Machine
from batchscape.record.disk import read_each
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.terminal import OutgoingConsole


def main(sweep_dir: str, shape: str, meeting: str, *nodes: str) -> int:
    """Do the runs that a job of some shape takes, until none is left that nobody has.

    Parameters
    ----------
    sweep_dir : str
    shape : str
        As `Shape` writes it.
    meeting : str
        Where the nodes of a job over several meet.
    *nodes : str
        Their names.
    """
    sweep, of_shape = SweepFolder(Path(sweep_dir)), Shape.named(shape)
    opens = None if len(nodes) < 2 else partial(open_nodes, Path(meeting), nodes)
    machine = _machine(len(nodes))
    console = OutgoingConsole(width=160, highlight=False, markup=False)
    looked_at: set[tuple[str, int | None]] = set()
    while True:
        # Runs may have been added while others were at work, or opened again.
        order = JobOrder.read(sweep)
        stood = read_each(_attempts_before, list(map(sweep.run, order.runs)), sweep.path)
        found = set(zip(order.runs, stood, strict=True))
        known = {name for name, _ in found & looked_at}
        note = partial(console.print, style="red", soft_wrap=True)
        specs = order.specs(sweep, of_shape, note, but=known)
        if not specs:
            return 0
        if opens is not None and looked_at:
            return QUEUE_AGAIN  # what srun has started on the nodes has ended with the first runs
        # One that is not open need not be looked at again, however it came to that.
        looked_at |= found | {(name, None) for name in order.runs}
        result = Launcher(
            sweep,
            machine,
            specs,
            console=console,
            command=order.command,
            opens=opens,
            is_part=True,
        ).run()
        if result.interrupted:
            return QUEUE_AGAIN
        if result.stopped is not None:
            return 1


def _attempts_before(run: RunFolder) -> int | None:
    """Return the attempts that were made at a run that is open; None where it is not."""
    status = RunStatus.if_readable(run.status)
    if status is None or status.status not in {Status.PENDING, Status.INTERRUPTED}:
        return None
    return len(status.attempts)


def _machine(nodes: int) -> Machine:
    """Return the allocation: what this node has, on each node."""
    found = Machine.detect()
    if nodes < 2:
        return found
    devices = [
        replace(device, index=index) for index, device in enumerate(found.cuda_devices * nodes)
    ]
    return replace(
        found, cpu_cores=found.cpu_cores * nodes, cores=(), cuda_devices=tuple(devices), nodes=nodes
    )


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except BatchscapeError as error:
        sys.exit(outgoing(str(error)))
