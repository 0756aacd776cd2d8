"""A job: a launcher inside its allocation, which shares the runs of a sweep with others."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from batchscape.errors import BatchscapeError
from batchscape.launch.launcher import Launcher
from batchscape.launch.slurm.nodes import open_nodes
from batchscape.launch.slurm.order import QUEUE_AGAIN, JobOrder
from batchscape.outgoing import outgoing
from batchscape.plan.machine import Machine
from batchscape.record.disk import read_each
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.terminal import OutgoingConsole


def main(sweep_dir: str, shape: str, address_file: str, *nodes: str) -> int:
    """Launch the runs of one shape, until each is over or another job has it.

    Parameters
    ----------
    sweep_dir : str
    shape : str
        As `shape_of` names it.
    address_file : str
        File for the address where several nodes meet.
    *nodes : str
        Names of the nodes.
    """
    sweep = SweepFolder(Path(sweep_dir))
    process_opener = None if len(nodes) < 2 else partial(open_nodes, Path(address_file), nodes)
    machine = _allocation(len(nodes))
    console = OutgoingConsole(width=160, highlight=False, markup=False)
    seen_states: set[tuple[str, int | None]] = set()
    while True:
        # Runs may have been added or opened again while others were at work.
        order = JobOrder.read(sweep)
        attempts = read_each(_attempts_before, list(map(sweep.run, order.runs)), sweep.path)
        states = set(zip(order.runs, attempts, strict=True))
        unchanged_ids = {name for name, _ in states & seen_states}
        note = partial(console.print, style="red", soft_wrap=True)
        specs = order.specs(sweep, shape, note, without=unchanged_ids)
        if not specs:
            return 0
        if process_opener is not None and seen_states:
            return QUEUE_AGAIN  # the processes that srun started have ended with the first runs
        # A run that is not open need not be looked at again.
        seen_states |= states | {(name, None) for name in order.runs}
        result = Launcher(
            sweep,
            machine,
            specs,
            console=console,
            command=order.command,
            process_opener=process_opener,
            is_part=True,
        ).run()
        if result.interrupted:
            return QUEUE_AGAIN
        if result.why_stopped is not None:
            return 1


def _attempts_before(run: RunFolder) -> int | None:
    """Return the number of attempts at a run; None where it is not open, or a job is at work."""
    status = RunStatus.if_readable(run.status)
    # Once another job leaves a run, the run is open again, with another number of attempts.
    if status is None or not status.status.is_open or status.status is Status.RUNNING:
        return None
    return len(status.attempts)


def _allocation(nodes: int) -> Machine:
    """Return all nodes of the job as one machine; each is like this node."""
    node = Machine.detect()
    if nodes < 2:
        return node
    devices = [
        replace(device, index=index) for index, device in enumerate(node.cuda_devices * nodes)
    ]
    return replace(
        node, cpu_cores=node.cpu_cores * nodes, cores=(), cuda_devices=tuple(devices), nodes=nodes
    )


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except BatchscapeError as error:
        sys.exit(outgoing(str(error)))
