"""The start of an attempt at a run: its folder is prepared, its placement recorded, ranks started.

Ranks share files in a scratch folder while they run. A launcher that is killed cannot remove its
folder; the next launcher of the same user does. A lock in each folder shows that it is in use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchscape.config import Command
from batchscape.errors import LaunchError
from batchscape.launch.active import ActiveRun
from batchscape.launch.beginnings import Branches
from batchscape.launch.child import COMMAND_WORKER, WORKER_ENVIRONMENT, Start
from batchscape.launch.devices import Lease
from batchscape.launch.ending import remove_dead_writes_of_run
from batchscape.launch.forkserver import ServerError
from batchscape.launch.hangs import HangWatch
from batchscape.launch.processes import Processes
from batchscape.record.claims import RunClaim
from batchscape.record.disk import disk_error
from batchscape.record.environment import environment
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import TABLES, SweepFolder
from batchscape.record.instants import now
from batchscape.record.locks import is_held, take
from batchscape.record.spec import RunSpec
from batchscape.record.state import RunState, read_state
from batchscape.record.status import Attempt, Cause, RunEnd, RunStatus, Status
from batchscape.record.timing import invalidate_times, processes_share, runs_share
from batchscape.text import count_text

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine

_PREFIX = "batchscape-scratch-"
_LOCK = "lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder among the temporary files of this machine, and remove it at the end.

    Yields
    ------
    Path
        Readable by this user alone.

    Raises
    ------
    OSError
        If the folder for temporary files cannot be used.
    """
    parent = Path(tempfile.gettempdir())
    _remove_leftovers(parent)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    # It gets its name once it is locked: other launchers remove a folder without a lock.
    lock = take(hidden / _LOCK)
    folder = hidden.rename(parent / hidden.name.removeprefix("."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()
        # What outlived a killed launcher for a while may have held its folder at the beginning.
        _remove_leftovers(parent)


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of launchers that are gone; those of other users cannot be removed."""
    with contextlib.suppress(OSError):
        for leftover in parent.glob(f"{_PREFIX}*"):
            if not leftover.is_symlink() and not is_held(leftover / _LOCK):
                shutil.rmtree(leftover, ignore_errors=True)


OTHER_LAUNCHER = "another launcher was at work on this machine"
"""Why the times of a run are not valid that had another launcher beside it."""
_EARLIER = "an earlier attempt: "
_TRUNK = "the run that it began as: "
_LOST = RunEnd(Status.INTERRUPTED, reason="the launcher died", cause=Cause.INTERRUPTED)


def launch_record(spec: RunSpec, lease: Lease, machine: Machine, *, others: bool) -> dict[str, Any]:
    """Describe how a run is placed, and whether its times can be compared."""
    concurrent = spec.config.launcher.concurrent_runs
    sharing = min(concurrent, spec.config.launcher.runs_per_device)
    # The device numbers of a CPU run are cores.
    leased = [d for d in machine.cuda_devices if d.index in lease.devices]
    leased = leased if spec.device_type == "cuda" else []
    why = []
    if lease.oversubscribed and spec.device_type == "cuda":
        devices = count_text(len(lease.devices), "CUDA device")
        why.append(processes_share(f"{lease.ranks} ranks", devices))
    if lease.ranks > machine.cpu_cores:
        why.append(processes_share(f"{lease.ranks} ranks", f"{machine.cpu_cores} cores"))
    if sharing > 1:
        why.append(runs_share(sharing, "a device"))
    oversubscribed = bool(why)
    workers = spec.config.loader.workers
    if workers and lease.ranks <= machine.cpu_cores < (processes := lease.ranks * (1 + workers)):
        ranks, each = count_text(lease.ranks, "rank"), " each" * (lease.ranks > 1)
        why.append(
            processes_share(
                f"{ranks} with {count_text(workers, 'loader worker')}{each}, "
                f"{processes} processes,",
                f"{machine.cpu_cores} cores",
            )
        )
    if concurrent > 1:
        why.append(runs_share(concurrent, "the machine"))
    if others:
        why.append(OTHER_LAUNCHER)
    memories = [d.memory_gib for d in leased if d.memory_gib is not None]
    return {
        "world_size": lease.ranks,
        "device_type": spec.device_type,
        "device_model": " + ".join(sorted({d.name for d in leased}))
        if spec.device_type == "cuda"
        else machine.cpu_name,
        "devices": list(lease.devices),
        # The memory of the host is in environment.json.
        **({"device_memory_gib": min(memories)} if memories else {}),
        "usable_cores": machine.cpu_cores,
        "threads_per_rank": 1,
        "concurrent_runs": concurrent,
        "runs_per_device": sharing,
        "oversubscribed": oversubscribed,
        # The follower of jobs asks Slurm by this id how the job ended.
        **({"slurm_job_id": job} if (job := os.environ.get("SLURM_JOB_ID")) else {}),
        "timing_valid": not why,
        "timing_invalid_reason": "; ".join(why) or None,
    }


def with_earlier_times(
    before: dict[str, Any], launch: dict[str, Any], whose: str = _EARLIER
) -> dict[str, Any]:
    """Return the launch record of a run that goes on: its rows are those of all its attempts."""
    launch = dict(launch)
    then, now = before.get("usable_cores"), launch["usable_cores"]
    if then != now:
        invalidate_times(launch, f"usable cores changed from {then} to {now} between attempts")
    if not before.get("timing_valid"):
        reasons = str(before.get("timing_invalid_reason") or "no reason recorded").split("; ")
        present = str(launch["timing_invalid_reason"]).split("; ")
        for reason in (reason.removeprefix(whose) for reason in reasons):
            if reason not in present:
                invalidate_times(launch, whose + reason)
    return launch


class Attempts:
    """Starts the attempts of one launch.

    Parameters
    ----------
    sweep : SweepFolder
    machine : Machine
    processes : Processes
    scratch : Path
        Folder on this machine for the meeting points of ranks.
    predictions : mapping of str to mapping
        Content of `prediction.json`, by run; only a first attempt writes it.
    entry : str
        Entry point of the ranks of our own loop.
    command : str or None
        The command of the launch, recorded with each run.
    branches : Branches
    """

    def __init__(
        self,
        sweep: SweepFolder,
        machine: Machine,
        processes: Processes,
        scratch: Path,
        *,
        predictions: Mapping[str, Mapping[str, Any]],
        entry: str,
        command: str | None,
        branches: Branches,
    ) -> None:
        self._branches = branches
        self._sweep, self._machine = sweep, machine
        self._processes = processes
        self._scratch = scratch
        self._predictions = predictions
        self._entry, self._command = entry, command
        self._environment = environment({**os.environ, **WORKER_ENVIRONMENT}, machine.cpu_cores)

    def begin(self, spec: RunSpec, lease: Lease, claim: RunClaim, *, others: bool) -> ActiveRun:
        """Prepare the folder of a run for its next attempt, and start the ranks.

        Parameters
        ----------
        spec : RunSpec
            Of a run that is not sealed.
        lease : Lease
        claim : RunClaim
            The ranks inherit it and the locks of the devices, which last as long as the ranks.
        others : bool
            Whether another launcher is at work on this machine.

        Raises
        ------
        RecordError
            If the folder is damaged.
        LaunchError
            If the run has a checkpoint from a device of another model, or no process can be
            started.
        ServerError or DiskError
            If no run can be started at all; the folder is then as it was.
        OSError
            If the folder cannot be written to.
        """
        folder = self._sweep.run(spec.run_id)
        state = read_state(folder, spec, is_ours=True)
        launch = {
            **launch_record(spec, lease, self._machine, others=others),
            "start_method": self._processes.method,
            "command": self._command,
            "rendezvous": str(self._scratch / spec.run_id),
            **self._processes.place(),
            **self._branches.launch_record(spec),
        }
        if state.goes_on:
            before = read_json(folder.launch)
            if (model := before.get("device_model")) != launch["device_model"]:
                # Times of two device models cannot be joined.
                msg = (
                    f"it was begun on {model} and cannot go on here, on {launch['device_model']}; "
                    f"delete {folder.path} to begin again"
                )
                raise LaunchError(msg)
            launch = with_earlier_times(before, launch)
            launch.pop("begins", None)
            if "begins" in before:
                launch["begins"] = before["begins"]
        elif "begins" in launch:
            before = read_json(folder.beginning / folder.launch.name)
            if before.get("device_model") == launch["device_model"]:
                launch = with_earlier_times(before, launch, _TRUNK)
            else:
                del launch["begins"]
                shutil.rmtree(folder.beginning, ignore_errors=True)
        if not state.goes_on:
            # An attempt that begins anew may be on another device; it keeps its own.
            shutil.rmtree(folder.branches, ignore_errors=True)
        attempt = len(state.record.attempts)
        # The ranks meet where no earlier attempt has left files.
        meeting = f"{launch['rendezvous']}-{attempt}"
        is_program = isinstance(spec.config.engine, Command)
        try:
            hangs = HangWatch(
                meeting,
                min(spec.processes, spec.geometry.devices_per_node),
                spec.config.launcher,
                is_program=is_program,
                has_others=spec.processes > spec.geometry.devices_per_node,
            )
        except OSError as error:
            # The disk of temporary files may be full while that of the sweep is not.
            raise disk_error(error, Path(meeting)) from error
        with ExitStack() as undone:
            undone.callback(hangs.close)
            launch = {"attempt": attempt, **launch, "rendezvous": meeting}
            status = self._write_start(spec, state, launch)
            active = ActiveRun(
                spec=spec,
                folder=folder,
                status=status,
                lease=lease,
                processes=self._processes,
                log_offset=folder.log.stat().st_size if folder.log.exists() else 0,
                launch=launch,
                hangs=hangs,
            )
            # By UUID: the numbers of NVML and of CUDA may differ.
            cuda = {device.index: device.uuid for device in self._machine.cuda_devices}
            uuids = [cuda[i] for i in lease.devices] if spec.device_type == "cuda" else []
            start = Start(
                run=spec.run_id,
                run_dir=str(folder.path.absolute()),
                log=str(folder.log.absolute()),
                ranks=spec.processes,
                entry=COMMAND_WORKER if is_program else self._entry,
                environment={"CUDA_VISIBLE_DEVICES": ",".join(uuids)},
                watched=meeting,
            )
            try:
                self._processes.start(start, (*claim.descriptors, *lease.locks))
            except ServerError:
                # The server is at fault and not this run, whose turn will come.
                state.record.write(folder.status)
                raise
            except LaunchError as error:
                active.abandon(str(error))
                raise
            undone.pop_all()
        return active

    def _write_start(self, spec: RunSpec, state: RunState, launch: dict[str, Any]) -> RunStatus:
        """Write the files of an attempt that begins into the folder of a run; return its status."""
        folder, before = state.folder, deepcopy(state.record)
        if state.is_lost and before.attempts:
            before.note_end(_LOST, state.lost_at)
        attempts = before.attempts
        remove_dead_writes_of_run(folder)
        for leftover in (*folder.outcomes(), *map(folder.parquet, TABLES)):
            # Parquet without a seal is from a launcher that died while sealing; the lines remain.
            leftover.unlink(missing_ok=True)
        spec.write(folder.config)
        write_json(folder.environment, self._environment)
        prediction = self._predictions.get(spec.run_id)
        if prediction is not None and not attempts:
            write_json(folder.prediction, dict(prediction))
        write_json(folder.launch, launch)
        engine = spec.config.engine
        if (
            isinstance(engine, Command)
            and not engine.resumable
            and folder.log.exists()
            and attempts
        ):
            # A program that begins again begins a new log: its losses may be read from the log.
            folder.log.rename(folder.log.with_name(f"log-{len(attempts) - 1}.txt"))
        # An attempt begins after the earlier ones, whatever the clock says.
        began = max([now(), *(ended.ended_at or ended.started_at for ended in attempts)])
        attempts.append(Attempt(began, 0))
        status = RunStatus(Status.RUNNING, attempts=attempts, summary=before.summary)
        status.write(folder.status)
        return status
