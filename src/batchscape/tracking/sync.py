"""`batchscape sync`: brings to Weights & Biases what it does not have yet, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batchscape.errors import LaunchError, RecordError
from batchscape.record.containment import refuse_links
from batchscape.record.folder import SweepFolder
from batchscape.record.neighbours import no_runs
from batchscape.tracking.state import Uploads, standing_of
from batchscape.tracking.watch import Event, Order, Worker

__all__ = ["sync"]


def sync(
    sweep_dirs: Sequence[Path],
    console: Console,
    *,
    project: str | None = None,
    entity: str | None = None,
    timeout_s: float = 600.0,
) -> bool:
    """Upload every ended run of some sweeps that W&B does not have as it ended.

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
        Longest time that one run may take, in seconds.

    Returns
    -------
    bool
        Whether W&B has every run that has ended.

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
    failed = uploaded = 0
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
                uploaded += event.kind == "done"
                if event.kind != "done":
                    failed += 1
                    console.print(f"{event.run}: not uploaded: {event.reason}", soft_wrap=True)
    console.print(_summary(found, uploaded, failed))
    return failed == 0


def _standing(sweep_dir: Path) -> Uploads:
    sweep = SweepFolder(sweep_dir)
    refuse_links(sweep)
    if not sweep.run_folders():
        raise RecordError(no_runs(sweep_dir))
    return standing_of(sweep_dir)


def _waiting(sweep: Uploads) -> set[str]:
    return {*sweep.offline, *sweep.lacking} - sweep.damaged.keys()


def _events(
    sweep: Uploads, project: str | None, entity: str | None, timeout_s: float
) -> Iterator[Event]:
    """Upload what waits; yield that a run begins, and what came of it."""
    for run, problem in sweep.damaged.items():
        yield Event("damaged", run, problem)
    left, failed = _waiting(sweep), list(sweep.damaged)
    while left:
        current: str | None = None
        order = Order(
            str(sweep.sweep_dir), "online", without=failed, project=project, entity=entity
        )
        with closing(Worker(order)) as worker:
            for event in worker.events(timeout_s):
                if event.kind == "refused":
                    raise LaunchError(str(event.reason))
                if event.run is None:
                    continue
                current = event.run if event.kind == "begin" else None
                if current is None:
                    left.discard(event.run)
                if event.kind == "damaged":
                    failed.append(event.run)
                yield event
        if worker.has_finished:
            return
        problem = f"{worker.problem}; details: {worker.log}"
        if current is None:
            msg = f"Weights & Biases: {problem}"
            raise LaunchError(msg)
        # Whatever W&B did: another worker goes on with the other runs.
        left.discard(current)
        failed.append(current)
        yield Event("failed", current, problem)


def _summary(found: Sequence[Uploads], uploaded: int, failed: int) -> str:
    parts = [f"uploaded {uploaded} {'run' if uploaded == 1 else 'runs'}"] if uploaded else []
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
