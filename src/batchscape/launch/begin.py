"""The start of one attempt at one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

from batchscape.config import Command
from batchscape.errors import LaunchError
from batchscape.launch.active import ActiveRun
from batchscape.launch.child import Start
from batchscape.launch.devices import Lease
from batchscape.launch.forked import ServerError
from batchscape.launch.hangs import HangWatch
from batchscape.launch.launch_record import with_times_of
from batchscape.launch.leftovers import remove_dead_writes
from batchscape.launch.processes import Processes
from batchscape.record.causes import Cause
from batchscape.record.disk import disk_error
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import TABLES, RunFolder
from batchscape.record.instants import now
from batchscape.record.spec import RunSpec
from batchscape.record.state import read_state
from batchscape.record.status import Attempt, RunStatus, Status

__all__ = ["begin"]


def begin(
    spec: RunSpec,
    folder: RunFolder,
    lease: Lease,
    processes: Processes,
    *,
    entry: str,
    launch: dict[str, Any],
    environment: dict[str, Any],
    prediction: Mapping[str, Any] | None,
    variables: dict[str, str],
    keep_open: Sequence[int] = (),
) -> ActiveRun:
    """Make the folder ready for the next attempt, and start the ranks.

    Parameters
    ----------
    spec : RunSpec
    folder : RunFolder
        With a status that is not sealed.
    lease : Lease
    processes : Processes
    entry : str
        What each rank calls.
    launch : dict
        For `launch.json`; the attempt is added, and what an earlier one says about its times.
    environment : dict
        For `environment.json`.
    prediction : mapping or None
        For `prediction.json`, which a later attempt leaves as it is.
    variables : dict
        Environment variables of the ranks.
    keep_open : sequence of int
        Descriptors that the ranks inherit, of locks that last as long as they do.

    Raises
    ------
    RecordError
        If the folder is damaged.
    LaunchError
        If the run has a checkpoint from a device of another model, or no process can be started.
    ServerError or DiskError
        If no run can be started at all; the folder is as it was then.
    OSError
        If the folder cannot be written to.
    """
    state = read_state(folder, spec, is_ours=True)
    standing = state.record
    if state.goes_on:
        before = read_json(folder.launch)
        _check_device_model(before, launch, folder)
        launch = with_times_of(before, launch)
    attempts = deepcopy(standing.attempts)
    attempt = len(attempts)
    # Nothing of an earlier attempt may be where the ranks meet.
    meeting = f"{launch['rendezvous']}-{attempt}"
    is_program = isinstance(spec.config.engine, Command)
    try:
        hangs = HangWatch(meeting, spec.processes, spec.config.launcher, is_program=is_program)
    except OSError as error:
        # The disk of temporary files may be full while that of the sweep is not.
        raise disk_error(error, Path(meeting)) from error
    with ExitStack() as undone:
        undone.callback(hangs.close)
        remove_dead_writes(folder)
        for leftover in (*folder.outcomes(), *map(folder.parquet, TABLES)):
            # Parquet without a seal is from a launcher that died while sealing; the lines remain.
            leftover.unlink(missing_ok=True)
        if attempts and attempts[-1].ended_at is None:
            lost = attempts[-1]
            # An attempt begins after those before it, even where its launcher's clock is behind.
            lost.ended_at = max(lost.started_at, standing.updated_at)
            lost.status, lost.reason = str(Status.INTERRUPTED), "the launcher died"
            lost.cause = str(Cause.INTERRUPTED)
        spec.write(folder.config)
        write_json(folder.environment, environment)
        if prediction is not None and not attempts:
            write_json(folder.prediction, dict(prediction))
        launch = {"attempt": attempt, **launch, "rendezvous": meeting}
        write_json(folder.launch, launch)
        _set_log_aside(spec, folder, attempt)
        # After the attempts before it, whatever the clock says.
        began = max([now(), *(before.ended_at or before.started_at for before in attempts)])
        status = RunStatus(
            Status.RUNNING,
            attempts=[*attempts, Attempt(began, 0)],
            summary=standing.summary,
        )
        status.write(folder.status)
        active = ActiveRun(
            spec=spec,
            folder=folder,
            status=status,
            lease=lease,
            processes=processes,
            log_offset=folder.log.stat().st_size if folder.log.exists() else 0,
            launch=launch,
            hangs=hangs,
        )
        start = Start(
            run=spec.run_id,
            run_dir=str(folder.path.absolute()),
            log=str(folder.log.absolute()),
            ranks=spec.processes,
            entry=entry,
            environment=variables,
            watched=meeting,
        )
        try:
            processes.start(start, keep_open)
        except ServerError:
            # It says nothing of this run, whose turn will come.
            standing.write(folder.status)
            raise
        except LaunchError as error:
            active.abandon(str(error))
            raise
        undone.pop_all()
    return active


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
