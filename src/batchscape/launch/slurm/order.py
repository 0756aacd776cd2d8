"""The order for the jobs of a sweep: the command writes it, every job reads it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from batchscape.config import Slurm
from batchscape.config.execution import SbatchValue
from batchscape.errors import BatchscapeError, DamageError, RecordError
from batchscape.record.disk import read_each
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

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


def job_name(sweep: SweepFolder, shape: str) -> str:
    """Return the name of jobs of a sweep, which is unique for its folder and a shape."""
    path = sweep.path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"{''.join(c for c in path.name if c.isalnum() or c in '_-')}-{shape}-{digest}"


def script(sweep: SweepFolder, spec: RunSpec, launcher: Slurm) -> str:
    """Return the script of the jobs that take the runs of one shape.

    Parameters
    ----------
    sweep : SweepFolder
    spec : RunSpec
    launcher : Slurm
    """
    shape, geometry = shape_of(spec), spec.geometry
    python = launcher.python or shlex.quote(sys.executable)
    options = _options(sweep, spec, launcher)
    cores = options.get("cpus-per-task")
    nodes = ""
    if shape != POOL:
        option = f"--cpus-per-task={cores} " if cores else ""
        nodes = _NODES.format(nodes=geometry.nodes, cores=option, python=python)
    return _SCRIPT.format(
        options="\n".join(
            f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
            for name, value in options.items()
            if value is not None and value is not False
        ),
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
    """Return the options of a job, by the long names of `sbatch`."""
    shape, devices = shape_of(spec), spec.config.cluster.devices_per_node
    is_cpu = spec.device_type == "cpu"
    options = {
        "job-name": job_name(sweep, shape),
        # A percent sign in the path of the folder would be read like that of "%j".
        "output": str(sweep.slurm.resolve()).replace("%", "%%") + "/job-%j.txt",
        "open-mode": "append",
        "requeue": True,
        "nodes": spec.geometry.nodes,
        "ntasks-per-node": 1,
        "time": launcher.timeout_min,
        "signal": f"B:USR1@{launcher.signal_delay_s}",
        "cpus-per-task" if is_cpu else "gpus-per-node": devices,
        **launcher.sbatch,
    }
    # The number in `launcher.sbatch` is for pool jobs; a job over nodes takes that of its shape.
    if shape != POOL and isinstance(options.get("gpus-per-node"), int):
        options["gpus-per-node"] = spec.geometry.devices_per_node
    return options


QUEUE_AGAIN = os.EX_TEMPFAIL
"""Exit code of a job's launcher that ends while runs are left: it was asked to stop, or cannot take
the runs that were added."""

_LAUNCHER = TypeAdapter(Slurm)


POOL = "pool"
"""Shape of the jobs on one node, which take runs of any number of ranks."""


def shape_of(spec: RunSpec) -> str:
    """Return the shape of the jobs that take a run: `POOL`, or its nodes and ranks on each: 2x4."""
    geometry = spec.geometry
    return POOL if geometry.nodes == 1 else f"{geometry.nodes}x{geometry.devices_per_node}"


@dataclass(frozen=True)
class JobOrder:
    """Runs, and how they are launched."""

    runs: tuple[str, ...]
    launcher: Slurm
    command: str | None

    def write(self, sweep: SweepFolder) -> None:
        """Replace the order for the jobs of a sweep; jobs at work read it again before they end."""
        launcher = _LAUNCHER.dump_python(self.launcher, mode="json")
        content = {"runs": list(self.runs), "launcher": launcher, "command": self.command}
        write_json(sweep.slurm / "order.json", content)

    @classmethod
    def read(cls, sweep: SweepFolder) -> JobOrder:
        """Read what `write` left.

        Raises
        ------
        RecordError
            If there is none, or it is damaged.
        """
        path = sweep.slurm / "order.json"
        content = read_json(path)
        try:
            launcher = _LAUNCHER.validate_json(json.dumps(content["launcher"]))
            return cls(tuple(content["runs"]), launcher, content["command"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamageError(f"{path} is damaged: {error}") from None

    def extended(self, sweep: SweepFolder) -> JobOrder:
        """Return this order with the runs of the earlier order added: jobs work on these."""
        runs = self.runs
        with suppress(RecordError):
            runs = (*JobOrder.read(sweep).runs, *runs)
        return replace(self, runs=tuple(dict.fromkeys(runs)))

    def specs(
        self,
        sweep: SweepFolder,
        shape: str,
        note: Callable[[str], object],
        without: Collection[str] = (),
    ) -> list[RunSpec]:
        """Return the runs of a shape, but for those in `without`, with the launcher of the order.

        Runs that cannot be read are left out; `note` takes a message about each.
        """

        def read(name: str) -> RunSpec | None:
            try:
                return RunSpec.read(sweep.run(name).config)
            except BatchscapeError as error:
                note(f"{name} is left out: {error}")
                return None

        specs = read_each(read, [name for name in self.runs if name not in without], sweep.path)
        return [
            replace(spec, config=replace(spec.config, launcher=self.launcher))
            for spec in specs
            if spec is not None and shape_of(spec) == shape
        ]


def shapes(specs: Iterable[RunSpec]) -> dict[str, list[RunSpec]]:
    """Return runs by the shape of the jobs that take them."""
    specs_by_shape: defaultdict[str, list[RunSpec]] = defaultdict(list)
    for spec in specs:
        specs_by_shape[shape_of(spec)].append(spec)
    return specs_by_shape
