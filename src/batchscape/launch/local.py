"""Running a sweep on this machine: what is left to do, in which order, and what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from batchscape.config import Command, NoTracker, Transformers
from batchscape.errors import LaunchError
from batchscape.launch.child import COMMAND_WORKER, WORKER
from batchscape.launch.claims import ClaimedRuns
from batchscape.launch.durations import Durations
from batchscape.launch.forked import ServerKilledError, open_processes
from batchscape.launch.interrupts import Interrupts
from batchscape.launch.leftovers import remove_dead_writes
from batchscape.launch.placement import Placement
from batchscape.launch.predictions import alike, foretold_s, predict
from batchscape.launch.presence import Presence
from batchscape.launch.processes import Processes
from batchscape.launch.progress import Progress
from batchscape.launch.result import RunResult, SweepResult
from batchscape.launch.schedule import launch_order
from batchscape.launch.scratch import scratch_folder
from batchscape.launch.session import Session, Steering
from batchscape.launch.standing import Standing, repeated
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import sweep_lock
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus
from batchscape.record.usable import check_usable
from batchscape.terminal import OutgoingConsole
from batchscape.tracking.mirror import Mirror, may_mirror_live

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine

__all__ = ["run_sweep"]

OpenProcesses = Callable[[str, Callable[[], bool], str], Processes | None]


def run_sweep(
    specs: Sequence[RunSpec],
    sweep: SweepFolder,
    machine: Machine,
    *,
    entry: str = WORKER,
    method: str | None = None,
    console: Console | None = None,
    command: str | None = None,
    steering: Steering | None = None,
    values: Mapping[str, str] | None = None,
    opens: OpenProcesses | None = None,
    is_part: bool = False,
) -> SweepResult:
    """Run everything that is missing; one run's failure leaves the others alone.

    Runs that ended by a fault before are launched again only where `launcher.retry` names their
    status. Other launchers may work in the same folder at the same time: no run is done twice.

    The first SIGINT, SIGTERM or SIGHUP asks the running ranks for a checkpoint and starts no
    more runs; a second one kills. The same call goes on from there.

    Parameters
    ----------
    specs : sequence of RunSpec
        Each run once, all with the same launcher and tracker settings.
    sweep : SweepFolder
        Where the run folders are, or will be.
    machine : Machine
        Devices that the runs may take.
    entry : str
        What every rank of our own loop calls, `module:function` of a run folder and a rank.
    method : str, optional
        `fork` or `spawn`; by default processes are forked where that is safe.
    console : Console, optional
        Where progress is shown; by default the standard output.
    command : str, optional
        As `record.commands.command_of` returns it; recorded with every run, and what is printed
        about the runs is built from it.
    steering : Steering, optional
        Adds runs on the way, with the launcher and the type of device of the others, and cuts
        some, which makes them `pruned`.
    values : mapping of str to str, optional
        What is shown beside the name of a run; runs may be added to it on the way.
    opens : callable, optional
        Opens another way of starting ranks: given what they call, a callable that says whether to
        stop, and a module to import ahead, as `open_processes` takes them.
    is_part : bool
        Whether another process follows the sweep, of which this one does a part: nobody waits here
        for runs of other launchers, and nothing is mirrored.

    Returns
    -------
    SweepResult

    Raises
    ------
    LaunchError
        If the folder cannot be used, two runs have one name, or no process can be started at all.
    """
    run_ids = [spec.run_id for spec in specs]
    if len(set(run_ids)) < len(run_ids):
        twice = next(name for name in run_ids if run_ids.count(name) > 1)
        msg = f"every run is launched once, but {twice} is given twice"
        raise LaunchError(msg)
    if not specs:
        return SweepResult((), interrupted=False)
    console = OutgoingConsole() if console is None else console
    ordered = launch_order(specs)
    check_usable(sweep)
    with sweep_lock(sweep), ExitStack() as stack:
        remove_dead_writes(sweep)
        standing = Standing(ordered, sweep, repeated(specs[0].config.launcher.retry))
        live = may_mirror_live(standing.missing, machine.cpu_cores)
        tracker = NoTracker("none") if is_part else specs[0].config.tracker
        mirror = Mirror(tracker, sweep, live=live)
        progress = Progress(console, len(specs) if steering is None else steering.runs, values)
        progress.stand_still(list(standing.settled.values()))
        presence = Presence()
        if standing.missing:
            stack.enter_context(presence)
        with Interrupts() as interrupts:
            launched = _launched(
                standing,
                sweep,
                machine,
                presence=presence,
                progress=progress,
                interrupts=interrupts,
                entry=entry,
                opens=opens or partial(_open, method),
                command=command,
                steering=steering,
                waits=not is_part,
            )
        interrupted = interrupts.count > 0
    with presence:
        note = mirror.finish(interrupted=interrupted)
    done = standing.settled | launched.done
    runs = tuple(done.get(spec.run_id) or _left(spec, sweep) for spec in standing.specs)
    result = SweepResult(runs, interrupted, launched.stopped, note, mirror.standing())
    progress.summary(result)
    return result


@dataclass(frozen=True)
class _LaunchResult:
    done: dict[str, RunResult]
    stopped: str | None = None


def _launched(
    standing: Standing,
    sweep: SweepFolder,
    machine: Machine,
    *,
    presence: Presence,
    progress: Progress,
    interrupts: Interrupts,
    entry: str,
    opens: OpenProcesses,
    command: str | None,
    steering: Steering | None,
    waits: bool,
) -> _LaunchResult:
    """Run what is missing, until it is done or a signal stops it."""
    missing = standing.missing
    if not missing:
        return _LaunchResult({})
    with ExitStack() as stack:
        try:
            processes = opens(
                _preloaded(missing, entry), lambda: interrupts.count > 0, _slow_import(missing)
            )
        except ServerKilledError as error:
            return _LaunchResult({}, f"no process can be started: {error}")
        if processes is None:
            return _LaunchResult({})
        claims = ClaimedRuns(sweep, standing, waits=waits)
        stack.callback(claims.release_all)
        stack.callback(processes.close)
        scratch = stack.enter_context(scratch_folder())
        predictions: dict[str, Mapping[str, Any]] = {}
        if entry == WORKER:
            predictions, trouble = predict(
                standing.specs,
                missing,
                sweep,
                processes,
                scratch,
                should_stop=lambda: interrupts.count > 0,
            )
            if trouble is not None:
                progress.warn(trouble)
        durations = Durations(sweep, standing.specs, foretold_s(predictions))
        placement = Placement(missing[0], machine, durations, progress.warn)
        stack.callback(placement.close)

        def more(over: Collection[str]) -> list[RunSpec]:
            while added := steering.more({*over, *standing.settled}) if steering else ():
                found = standing.add(added)
                progress.stand_still([r for s in added if (r := standing.settled.get(s.run_id))])
                predictions.update(alike(found, standing.specs, predictions))
                if found:
                    return found
            return []

        session = Session(
            sweep=sweep,
            machine=machine,
            processes=processes,
            progress=progress,
            interrupts=interrupts,
            presence=presence,
            claims=claims,
            placement=placement,
            entry=entry,
            scratch=scratch,
            predictions=predictions,
            max_failures=missing[0].config.launcher.max_failures,
            command=command,
            steering=steering,
            more=None if steering is None else more,
        )
        with progress:
            return _LaunchResult(session.run(deque(missing)), session.stopped)


def _preloaded(specs: Iterable[RunSpec], entry: str) -> str:
    """Name what most processes of a sweep call."""
    if all(isinstance(spec.config.engine, Command) for spec in specs):
        return COMMAND_WORKER
    return entry


def _slow_import(specs: Iterable[RunSpec]) -> str:
    """Name the module that models of a sweep need and that is worth importing once for all."""
    if any(isinstance(spec.config.model, Transformers) for spec in specs):
        return "batchscape.models.offline_transformers"
    return ""


def _open(
    method: str | None, entry: str, should_stop: Callable[[], bool], also_preload: str
) -> Processes | None:
    return open_processes(entry, should_stop, method, also_preload)


def _left(spec: RunSpec, sweep: SweepFolder) -> RunResult:
    """Return how a run stands whose turn did not come."""
    folder = sweep.run(spec.run_id)
    status = RunStatus.read(folder.status)
    return RunResult(spec.run_id, status.status, status.reason, folder.log)
