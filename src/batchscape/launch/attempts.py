"""The start of each attempt at a run: its folder made ready, its ranks started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchscape.config import Command
from batchscape.errors import LaunchError
from batchscape.launch.active import ActiveRun
from batchscape.launch.child import COMMAND_WORKER, WORKER_ENVIRONMENT, Start
from batchscape.launch.devices import Lease
from batchscape.launch.forked import ServerError
from batchscape.launch.hangs import HangWatch
from batchscape.launch.launch_record import launch_record, with_times_of
from batchscape.launch.leftovers import remove_dead_writes_of_run
from batchscape.launch.processes import Processes
from batchscape.record.causes import Cause
from batchscape.record.claims import RunClaim
from batchscape.record.disk import disk_error
from batchscape.record.environment import environment
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.instants import now
from batchscape.record.spec import RunSpec
from batchscape.record.state import read_state
from batchscape.record.status import Attempt, RunStatus, Status

if TYPE_CHECKING:
    from batchscape.cuda_devices import CudaDevice
    from batchscape.plan.machine import Machine

__all__ = ["Attempts"]


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
        What `prediction.json` of a run is to hold, by run; a later attempt leaves it as it is.
    entry : str
        What the ranks of our own loop call.
    command : str or None
        What asked for these runs, recorded with each.
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
    ) -> None:
        self._sweep, self._machine = sweep, machine
        self._processes = processes
        self._scratch = scratch
        self._predictions = predictions
        self._entry, self._command = entry, command
        self._environment = environment({**os.environ, **WORKER_ENVIRONMENT}, machine.cpu_cores)

    def begin(self, spec: RunSpec, lease: Lease, claim: RunClaim, *, others: bool) -> ActiveRun:
        """Make the folder of a run ready for its next attempt, and start the ranks.

        Parameters
        ----------
        spec : RunSpec
            Of a run that is not sealed.
        lease : Lease
        claim : RunClaim
            The ranks inherit it, and the locks of the devices, which last as long as they do.
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
            If no run can be started at all; the folder is as it was then.
        OSError
            If the folder cannot be written to.
        """
        folder = self._sweep.run(spec.run_id)
        state = read_state(folder, spec, is_ours=True)
        launch = self._launch_record(spec, lease, others=others)
        if state.goes_on:
            before = read_json(folder.launch)
            _check_device_model(before, launch, folder)
            launch = with_times_of(before, launch)
        attempt = len(state.record.attempts)
        # Nothing of an earlier attempt may be where the ranks meet.
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
            status = self._write_start(spec, folder, state.record, launch)
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
            uuids = [device.uuid for device in self._leased(spec, lease)]
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
                # It says nothing of this run, whose turn will come.
                state.record.write(folder.status)
                raise
            except LaunchError as error:
                active.abandon(str(error))
                raise
            undone.pop_all()
        return active

    def _leased(self, spec: RunSpec, lease: Lease) -> list[CudaDevice]:
        if spec.device_type != "cuda":
            return []
        cuda = {device.index: device for device in self._machine.cuda_devices}
        return [cuda[index] for index in lease.devices]

    def _launch_record(self, spec: RunSpec, lease: Lease, *, others: bool) -> dict[str, Any]:
        return {
            **launch_record(spec, lease, self._machine, others=others),
            "start_method": self._processes.method,
            "command": self._command,
            "rendezvous": str(self._scratch / spec.run_id),
            **self._processes.place(),
        }

    def _write_start(
        self, spec: RunSpec, folder: RunFolder, before: RunStatus, launch: dict[str, Any]
    ) -> RunStatus:
        """Write into the folder of a run that it is running, and what it is; return its status."""
        attempts = deepcopy(before.attempts)
        remove_dead_writes_of_run(folder)
        for leftover in (*folder.outcomes(), *map(folder.parquet, TABLES)):
            # Parquet without a seal is from a launcher that died while sealing; the lines remain.
            leftover.unlink(missing_ok=True)
        if attempts and attempts[-1].ended_at is None:
            lost = attempts[-1]
            # An attempt begins after those before it, even where its launcher's clock is behind.
            lost.ended_at = max(lost.started_at, before.updated_at)
            lost.status, lost.reason = str(Status.INTERRUPTED), "the launcher died"
            lost.cause = str(Cause.INTERRUPTED)
        spec.write(folder.config)
        write_json(folder.environment, self._environment)
        prediction = self._predictions.get(spec.run_id)
        if prediction is not None and not attempts:
            write_json(folder.prediction, dict(prediction))
        write_json(folder.launch, launch)
        _set_log_aside(spec, folder, len(attempts))
        # After the attempts before it, whatever the clock says.
        began = max([now(), *(ended.ended_at or ended.started_at for ended in attempts)])
        attempts.append(Attempt(began, 0))
        status = RunStatus(Status.RUNNING, attempts=attempts, summary=before.summary)
        status.write(folder.status)
        return status


def _set_log_aside(spec: RunSpec, folder: RunFolder, attempt: int) -> None:
    """Give a program that begins again an empty log: its losses may be read from it."""
    engine = spec.config.engine
    if isinstance(engine, Command) and not engine.resumable and folder.log.exists() and attempt:
        folder.log.rename(folder.log.with_name(f"log-{attempt - 1}.txt"))


def _check_device_model(before: dict[str, Any], launch: dict[str, Any], folder: RunFolder) -> None:
    """Refuse to go on from a checkpoint of another device: the times would mean nothing."""
    if before.get("device_model") != launch["device_model"]:
        msg = (
            f"it was begun on {before.get('device_model')} and cannot go on here, on "
            f"{launch['device_model']}; delete {folder.path} to begin again"
        )
        raise LaunchError(msg)
