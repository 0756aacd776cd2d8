"""The script of a job: what it asks for, and what it does."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Mapping

from batchscape.config import Slurm
from batchscape.config.execution import SbatchValue
from batchscape.launch.slurm.order import POOL, QUEUE_AGAIN, Shape
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

__all__ = ["job_name", "script"]

_SCRIPT = """\
#!/bin/bash
{options}
# A signal that comes before Python has started says that the time is over before it began.
trap : USR1 TERM
{setup}
meeting={slurm}/$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}.meeting
{nodes}{python} -m batchscape.launch.slurm.job {sweep} {shape} "$meeting" \\
    $(scontrol show hostnames "$SLURM_JOB_NODELIST") &
launcher=$!
# Before the time limit, or a preemption, Slurm signals this shell alone. Where it ends the job it
# signals all processes, and the launcher must not be told twice.
trap 'kill -TERM $launcher' USR1
while true; do
    wait $launcher
    code=$?
    kill -0 $launcher 2>/dev/null || break
done
# Runs are left. A job that was cancelled is not running any more.
if [ $code = {again} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {most} ] &&
    [ "$(squeue --noheader --jobs=$SLURM_JOB_ID --format=%T)" = RUNNING ]; then
    scontrol requeue $SLURM_JOB_ID && sleep 60
fi
exit $code
"""

_NODES = """\
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 {cores}--mpi=none --wait=0 \\
    {python} -m batchscape.launch.slurm.node "$meeting" &
"""


def job_name(sweep: SweepFolder, shape: Shape) -> str:
    """Return what jobs of a sweep are called: the folder and the shape, and no others' name."""
    path = sweep.path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"{''.join(c for c in path.name if c.isalnum() or c in '_-')}-{shape}-{digest}"


def script(sweep: SweepFolder, spec: RunSpec, launcher: Slurm) -> str:
    """Return the script of a job that takes a run, and those of its shape.

    Parameters
    ----------
    sweep : SweepFolder
    spec : RunSpec
    launcher : Slurm
    """
    shape = Shape.of(spec)
    python = launcher.python or shlex.quote(sys.executable)
    options = _options(sweep, spec, launcher)
    cores = options.get("cpus-per-task")
    nodes = ""
    if shape != POOL:
        asked = f"--cpus-per-task={cores} " if cores else ""
        nodes = _NODES.format(nodes=shape.nodes, cores=asked, python=python)
    return _SCRIPT.format(
        options="\n".join(_comments(options)),
        setup="\n".join(launcher.setup),
        slurm=shlex.quote(str(sweep.slurm.resolve())),
        sweep=shlex.quote(str(sweep.path.resolve())),
        shape=shape,
        nodes=nodes,
        python=python,
        again=QUEUE_AGAIN,
        most=launcher.max_num_timeout,
    )


def _options(sweep: SweepFolder, spec: RunSpec, launcher: Slurm) -> dict[str, SbatchValue]:
    """Return what a job asks for, by the long names of the options of `sbatch`."""
    shape, devices = Shape.of(spec), spec.config.cluster.devices_per_node
    is_cpu = spec.device_type == "cpu"
    options = {
        "job-name": job_name(sweep, shape),
        # Slurm reads a percent sign of the folder's own as it reads "%j".
        "output": str(sweep.slurm.resolve()).replace("%", "%%") + "/job-%j.txt",
        "open-mode": "append",
        "requeue": True,
        "nodes": shape.nodes,
        "ntasks-per-node": 1,
        "time": launcher.timeout_min,
        "signal": f"B:USR1@{launcher.signal_delay_s}",
        "cpus-per-task" if is_cpu else "gpus-per-node": devices,
        **launcher.sbatch,
    }
    # A number is what pool jobs ask for; a job over nodes takes whole nodes of its shape.
    if shape != POOL and isinstance(options.get("gpus-per-node"), int):
        options["gpus-per-node"] = shape.devices_per_node
    return options


def _comments(options: Mapping[str, SbatchValue]) -> list[str]:
    """Write options as `sbatch` reads them from a script."""
    return [
        f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for name, value in options.items()
        if value is not None and value is not False
    ]
