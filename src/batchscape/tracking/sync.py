"""`batchscape sync`: brings to Weights & Biases what it does not have yet, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batchscape.errors import LaunchError, RecordError
from batchscape.record.folder import SweepFolder
from batchscape.record.neighbours import no_runs
from batchscape.tracking.state import MirrorState, Uploads, standing_of
from batchscape.tracking.watch import REPORT, WORKSPACE, Event, Order, Worker

__all__ = ["sync"]

_KINDS = {REPORT: "report", WORKSPACE: "workspace"}
_AT_ONCE = 8
"""Runs that are uploaded at a time: nearly all of it is waiting for the server."""


def sync(
    sweep_dirs: Sequence[Path],
    console: Console,
    *,
    project: str | None = None,
    entity: str | None = None,
    timeout_s: float = 600.0,
) -> bool:
    """Upload every ended run, and the report, of some sweeps that W&B does not have as they are.

    A run is noted as uploaded when the server shows its end, so that the same call goes on where
    another one was stopped, and then has nothing to do.

    Parameters
    ----------
    sweep_dirs : sequence of Path
        Folders of sweeps.
    console : Console
        Where progress is shown.
    project, entity : str, optional
        Where runs that W&B has not seen yet go; by default as their own settings say.
    timeout_s : float
        Longest time that one run, or the report, may take, in seconds.

    Returns
    -------
    bool
        Whether W&B has every run that has ended, and the report.

    Raises
    ------
    RecordError
        If a folder holds no runs.
    LaunchError
        If nothing can be uploaded: no key, no network, or another process is at it; or if
        something in a folder leads out of it.
    """
    # One folder, one name: the lock and the log of its mirror lie in it.
    found = [_standing(path) for path in dict.fromkeys(path.resolve() for path in sweep_dirs)]
    failed = 0
    done: Counter[str] = Counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=sum(len(_waiting(sweep)) for sweep in found))
        for sweep in found:
            for event in _events(sweep, project, entity, timeout_s):
                if event.kind == "begin":
                    progress.update(task, description=str(event.run))
                    continue
                progress.advance(task)
                if event.kind == "done":
                    done[_KINDS.get(str(event.run), "run")] += 1
                else:
                    failed += 1
                    console.print(f"{event.run}: not uploaded: {event.reason}", soft_wrap=True)
    for sweep in found:
        if (address := _workspace(sweep)) is not None:
            console.print(f"Workspace: {address}", soft_wrap=True)
    console.print(_summary(found, done, failed))
    return failed == 0


def _standing(sweep_dir: Path) -> Uploads:
    sweep = SweepFolder(sweep_dir)
    if not sweep.run_folders():
        raise RecordError(no_runs(sweep_dir))
    return standing_of(sweep_dir)


def _workspace(sweep: Uploads) -> str | None:
    with suppress(RecordError):
        noted = MirrorState.read(SweepFolder(sweep.sweep_dir))
        return None if noted is None else noted.workspace
    return None


def _waiting(sweep: Uploads) -> set[str]:
    found = {*sweep.offline, *sweep.lacking} - sweep.damaged.keys()
    if sweep.lacks_report:
        found.add(REPORT)
    if sweep.lacks_workspace and (found or sweep.uploaded):
        found.add(WORKSPACE)
    return found


def _events(
    sweep: Uploads, project: str | None, entity: str | None, timeout_s: float
) -> Iterator[Event]:
    """Upload what waits; yield that a run begins, and what came of it."""
    for run, problem in sweep.damaged.items():
        yield Event("damaged", run, problem)
    left = _waiting(sweep)
    if not left:
        return
    order = Order(
        str(sweep.sweep_dir),
        "online",
        at_once=_AT_ONCE,
        beside=sorted(left & _KINDS.keys()),
        project=project,
        entity=entity,
    )
    with closing(Worker(order)) as worker:
        for event in worker.events(timeout_s):
            if event.kind == "refused":
                raise LaunchError(str(event.reason))
            # A run may have ended since, and a damaged one has been told: that is no news.
            if event.run not in left:
                continue
            if event.kind != "begin":
                left.discard(str(event.run))
            yield event
    if not worker.has_finished:
        why = f"{worker.problem}; details: {worker.log}"
        if left == _waiting(sweep):
            msg = f"Weights & Biases: {why}"
            raise LaunchError(msg)
        yield from (Event("failed", run, why) for run in sorted(left))


def _summary(found: Sequence[Uploads], done: Counter[str], failed: int) -> str:
    kinds = [kind for kind in ("run", *_KINDS.values()) if done[kind]]
    sent = [f"{done[kind]} {kind}" + "s" * (done[kind] > 1) for kind in kinds]
    parts = [f"uploaded {', '.join(sent)}"] if sent else []
    if failed:
        parts.append(f"{failed} not uploaded: the same command tries again")
    if not parts:
        parts.append("nothing to upload")
    before = sum(len(sweep.uploaded) for sweep in found)
    if before:
        parts.append(f"{before} had been uploaded before")
    unended = sum(len(sweep.open) for sweep in found)
    if unended:
        parts.append(f"{unended} have not ended")
    return f"Weights & Biases: {'; '.join(parts)}"
