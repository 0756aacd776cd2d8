"""`batchscape sync`: brings to Weights & Biases what it does not have yet, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from batchscape.errors import LaunchError, RecordError
from batchscape.record.folder import SweepFolder, no_runs
from batchscape.text import count_text
from batchscape.tracking.mirror import Event, MirrorRequest, Worker
from batchscape.tracking.state import MirrorState, Uploads, standing_of


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
        Longest time without news of any run, in seconds.

    Returns
    -------
    bool
        Whether W&B has every run that has ended, and the report.

    Raises
    ------
    RecordError
        If a folder holds no runs.
    LaunchError
        If nothing can be uploaded: no key, no network, or another process is at it.
    """
    # One folder, one name: the lock and the log of its mirror lie in it.
    sweeps = [_standing(path) for path in dict.fromkeys(path.resolve() for path in sweep_dirs)]
    done: Counter[str] = Counter()
    failed = 0
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=sum(len(_waiting(sweep)) for sweep in sweeps))
        for sweep in sweeps:
            for event in _events(sweep, project, entity, timeout_s):
                progress.advance(task)
                if event.kind == "done":
                    done[event.run if event.run in {"report", "workspace"} else "run"] += 1
                else:
                    failed += 1
                    console.print(f"{event.run}: not uploaded: {event.reason}", soft_wrap=True)
    for sweep in sweeps:
        with suppress(RecordError):
            noted = MirrorState.read(SweepFolder(sweep.sweep_dir))
            if noted is not None and noted.workspace is not None:
                console.print(f"Workspace: {noted.workspace}", soft_wrap=True)
    console.print(_summary(sweeps, done, failed))
    return failed == 0


def _standing(sweep_dir: Path) -> Uploads:
    sweep = SweepFolder(sweep_dir)
    if not sweep.run_folders():
        raise RecordError(no_runs(sweep_dir))
    return standing_of(sweep_dir)


def _waiting(sweep: Uploads) -> set[str]:
    waiting = {*sweep.offline, *sweep.lacking} - sweep.damaged.keys()
    if sweep.lacks_report:
        waiting.add("report")
    if sweep.lacks_workspace and (waiting or sweep.uploaded):
        waiting.add("workspace")
    return waiting


def _events(
    sweep: Uploads, project: str | None, entity: str | None, timeout_s: float
) -> Iterator[Event]:
    """Upload what waits; yield what came of each."""
    for run, problem in sweep.damaged.items():
        yield Event("failed", run, problem)
    left = _waiting(sweep)
    if not left:
        return
    beside = sorted(left & {"report", "workspace"})
    request = MirrorRequest(str(sweep.sweep_dir), "online", "sync", beside, project, entity)
    with closing(Worker(request)) as worker:
        for event in worker.events(timeout_s):
            # A run may have ended since, and a damaged one has been told: that is no news.
            if event.run in left:
                left.discard(str(event.run))
                yield event
    if not worker.has_finished:
        if left == _waiting(sweep):
            msg = f"Weights & Biases: {worker.problem}; details: {worker.log}"
            raise LaunchError(msg)
        yield from (Event("failed", run, worker.problem) for run in sorted(left))


def _summary(sweeps: Sequence[Uploads], done: Counter[str], failed: int) -> str:
    kinds = [kind for kind in ("run", "report", "workspace") if done[kind]]
    sent = [count_text(done[kind], kind) for kind in kinds]
    parts = [f"uploaded {', '.join(sent)}"] if sent else []
    if failed:
        parts.append(f"{failed} not uploaded: the same command tries again")
    if not parts:
        parts.append("nothing to upload")
    before = sum(len(sweep.uploaded) for sweep in sweeps)
    if before:
        parts.append(f"{before} had been uploaded before")
    unended = sum(len(sweep.open) for sweep in sweeps)
    if unended:
        parts.append(f"{unended} have not ended")
    return f"Weights & Biases: {'; '.join(parts)}"
